// The render function that front ends call.

import { h } from "./dom.js";

const KERNEL_ENDED = "the kernel has stopped";
const LIVE = ".dk-live, .dk-status"; // elements that describe a running program
const ENDS = ["restarting", "autorestarting", "terminating", "dead"]; // kernel states of JupyterLab

export function renders(View) {
  return ({ model, el }) => {
    const view = new View(model, el);
    const stop = new AbortController();
    // otherwise, JupyterLab would make this cell active, and Shift+Enter would run it again
    for (const type of ["mousedown", "focusin"])
      el.addEventListener(type, (e) => e.stopPropagation(), { signal: stop.signal });
    const unsubscribe = onEnd(model, el, view);
    return () => {
      stop.abort();
      unsubscribe();
      view.dispose();
    };
  };
}

// Reports the end of the kernel in a view; a view with an ended() method also reports it itself.
// Returns a function that unsubscribes.
function onEnd(model, el, view) {
  const report = () => {
    for (const live of el.querySelectorAll(LIVE)) {
      if (live.textContent !== KERNEL_ENDED) live.textContent = KERNEL_ENDED;
    }
    if (view.ended || el.querySelector(`${LIVE}, .dk-ended`)) return;
    el.querySelector("figure")?.prepend(h("p", { class: "dk-ended", role: "note" }, KERNEL_ENDED));
  };
  const observer = new MutationObserver(report); // pending kernel messages may still be drawn
  const ended = () => {
    el.dataset.kernel = "ended";
    view.ended?.();
    report();
    observer.observe(el, { childList: true, subtree: true });
  };
  const onStatus = (_, status) => ENDS.includes(status) && ended();
  const kernel = model.widget_manager?.kernel;
  model.on("comm_live_update", ended); // sent to a widget when its kernel restarts
  kernel?.statusChanged?.connect(onStatus);
  kernel?.disposed?.connect(ended);
  return () => {
    model.off("comm_live_update", ended);
    kernel?.statusChanged?.disconnect(onStatus);
    kernel?.disposed?.disconnect(ended);
    observer.disconnect();
  };
}
