// What a front end calls to have a view drawn: it draws, or says in its place why it cannot.

const KERNEL_ENDED = "the kernel has ended";

// known: the newest format of pictures that these painters understand.
export function renders(View, known) {
  return ({ model, el }) => {
    const { format = known } = model.get("picture") ?? {};
    if (format > known) {
      el.append(newer(format, known));
      return () => el.replaceChildren();
    }
    const view = new View(model, el);
    // JupyterLab would make this cell the active one, and Shift+Enter would run it again
    for (const type of ["mousedown", "focusin"]) el.addEventListener(type, keep);
    const say = () => {
      for (const live of el.querySelectorAll(".dk-live")) if (live.textContent !== KERNEL_ENDED) live.textContent = KERNEL_ENDED;
    };
    const again = new MutationObserver(say); // what the kernel had said before may be drawn later
    const ended = () => { say(); again.observe(el, { childList: true, subtree: true }); };
    model.on("comm_live_update", ended); // what a widget hears when its kernel restarts or ends
    return () => {
      model.off("comm_live_update", ended);
      for (const type of ["mousedown", "focusin"]) el.removeEventListener(type, keep);
      again.disconnect();
      view.dispose();
    };
  };
}

function keep(event) {
  event.stopPropagation();
}

function newer(format, known) {
  const note = document.createElement("figure");
  note.className = "distkit-newer";
  note.setAttribute("role", "note");
  note.style.cssText = "margin:4px 0;padding:14px 18px;border:1px solid;border-radius:12px;font:14px/1.5 var(--jp-ui-font-family,sans-serif)";
  note.textContent = `This picture was drawn by a newer distkit (format ${format}, this page knows ${known}): ` +
    "update distkit and reload the page.";
  return note;
}
