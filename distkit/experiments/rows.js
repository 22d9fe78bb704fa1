// The table of runs. A click on a row, or Enter, tells its run.
function render({ model, el }) {
  const draw = () => {
    el.innerHTML = model.get("value");
    for (const row of el.querySelectorAll("tr[data-run]")) {
      row.tabIndex = 0;
      if (Number(row.dataset.run) === model.get("shown")) row.setAttribute("aria-current", "true");
    }
  };
  const choose = (event) => {
    const row = event.target.closest("tr[data-run]");
    if (row && (event.type === "click" || event.key === "Enter")) {
      model.send({ run: Number(row.dataset.run) });
    }
  };
  el.addEventListener("click", choose);
  el.addEventListener("keydown", choose);
  model.on("change:value change:shown", draw);
  draw();
  return () => model.off("change:value change:shown", draw);
}

export default { render };
