// The table of runs. A click on a row, or Enter, tells its run; arrows go from row to row.
function render({ model, el }) {
  const draw = () => {
    el.innerHTML = model.get("value");
    mark();
  };
  const mark = () => { // the rows stay, and with them the focus
    for (const row of el.querySelectorAll("tbody tr")) {
      row.tabIndex = 0;
      row.dataset.run = row.querySelector("th").textContent;
      row.ariaCurrent = Number(row.dataset.run) === model.get("shown") ? "true" : null;
    }
  };
  const choose = (event) => {
    const row = event.target.closest("tr[data-run]");
    if (row && (event.type === "click" || event.key === "Enter"))
      model.send({ run: Number(row.dataset.run) });
  };
  el.addEventListener("click", choose);
  el.addEventListener("keydown", (event) => {
    const by = { ArrowUp: "previousElementSibling", ArrowDown: "nextElementSibling" }[event.key];
    if (!by) return choose(event);
    event.preventDefault();
    event.stopPropagation(); // or the notebook would go to another cell
    event.target.closest("tr[data-run]")?.[by]?.focus();
  });
  model.on("change:value", draw);
  model.on("change:shown", mark);
  draw();
  return () => {
    model.off("change:value", draw);
    model.off("change:shown", mark);
  };
}
