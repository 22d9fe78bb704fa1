// The Run button. A click sends the values of the controls on the page, because ipywidgets sends
// one message at a time and may not have synchronized them yet.
const PREFIX = "IPY_MODEL_".length;

async function controlStates(model) {
  const states = [];
  for (const [reference, key] of model.get("controls")) {
    const control = await model.widget_manager.get_model(reference.slice(PREFIX));
    states.push(control.serialize({ [key]: control.get(key) }));
  }
  return states;
}

function render({ model, el }) {
  const button = document.createElement("button");
  button.className = "jupyter-widgets jupyter-button widget-button dkx-run";
  button.title = "Run with these values on every rank";
  button.innerHTML = '<i class="fa fa-play"></i>Run';
  button.addEventListener("click", async () => model.send({ shown: await controlStates(model) }));
  const update = () => {
    button.disabled = model.get("disabled");
  };
  model.on("change:disabled", update);
  update();
  el.append(button);
  return () => model.off("change:disabled", update);
}
