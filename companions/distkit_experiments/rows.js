// The table of runs. A click on a row, or Enter, selects its run; arrow keys move between rows.
function render({ model, el }) {
  const draw = () => {
    el.innerHTML = model.get("value");
    mark();
  };
  const mark = () => { // updates the rows in place, so that they keep the focus
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
    const direction = { ArrowUp: "previousElementSibling", ArrowDown: "nextElementSibling" }[event.key];
    if (!direction) return choose(event);
    event.preventDefault();
    event.stopPropagation(); // the notebook would select another cell
    event.target.closest("tr[data-run]")?.[direction]?.focus();
  });
  model.on("change:value", draw);
  model.on("change:shown", mark);
  draw();
  return () => {
    model.off("change:value", draw);
    model.off("change:shown", mark);
  };
}
