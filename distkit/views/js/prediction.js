// A question, a place for a guess, and Commit. Which guesses are possible, the kernel decides.

import { h } from "./dom.js";

const name = "guess";

export class Prediction {
  constructor(model, el) {
    this.model = model;
    this.root = h("figure", { class: "distkit-prediction" });
    el.append(this.root);
    this.changed = () => this.#draw();
    model.on("change:picture", this.changed);
    this.#draw();
  }

  #draw() {
    const { question, choices, guess, open, status, note } = this.model.get("picture");
    // its keys are not for JupyterLab, where M, say, makes another kind of cell of this one
    const own = { name, disabled: open ? null : "", "data-lm-suppress-shortcuts": "" };
    const field = choices.length
      ? h("div", { class: "dk-choices", role: "radiogroup", "aria-label": question },
        choices.map((choice) => h("label", {}, h("input", { ...own, type: "radio",
          value: choice, required: "", checked: choice === guess ? "" : null }), choice)))
      : h("input", { ...own, type: "text", value: guess, required: "", autocomplete: "off",
        "aria-label": "your guess", placeholder: "your guess" });
    const commit = h("button", { ...own, name: null, type: "submit" },
      open ? "Commit" : "Committed");
    const onsubmit = (event) => this.#commit(event, commit);
    const onkeydown = (e) => { // nor do they take the reader to the active cell
      e.stopPropagation();
      if (e.key !== "Enter" || e.target === commit) return;
      e.preventDefault();
      e.currentTarget.requestSubmit();
    };
    this.root.replaceChildren(
      h("p", { class: "dk-question" }, question),
      h("form", { onsubmit, onkeydown, hidden: open || guess ? null : "" }, field, commit),
      h("p", { class: `dk-note dk-${status}`, role: "status" }, note));
  }

  #commit(event, button) {
    event.preventDefault();
    button.disabled = true; // until the kernel, which may be busy, has taken it
    this.model.send({ guess: new FormData(event.target).get(name) });
  }

  dispose() {
    this.model.off("change:picture", this.changed);
    this.root.remove();
  }
}
