// The Run button. A press tells what the page shows of the controls: their own messages, of which
// ipywidgets sends one at a time, may come later.
const PREFIX = "IPY_MODEL_".length;

async function shown(model) {
  const found = [];
  for (const [reference, key] of model.get("controls")) {
    const control = await model.widget_manager.get_model(reference.slice(PREFIX));
    found.push(control.serialize({ [key]: control.get(key) }));
  }
  return found;
}

function render({ model, el }) {
  const button = document.createElement("button");
  button.className = "jupyter-widgets jupyter-button widget-button dkx-run";
  button.title = "Run with these values on every rank";
  button.innerHTML = '<i class="fa fa-play"></i>Run';
  button.addEventListener("click", async () => model.send({ shown: await shown(model) }));
  const follow = () => {
    button.disabled = model.get("disabled");
  };
  model.on("change:disabled", follow);
  follow();
  el.append(button);
  return () => model.off("change:disabled", follow);
}
