// A question, an input for a guess, and a Commit button. The kernel validates the guess.

import { h } from "./dom.js";
import { Follower } from "./follower.js";

const name = "guess";

// Text between backticks is code.
const formatted = (text) => text.split("`").map((part, i) => (i % 2 ? h("code", {}, part) : part));

// A question; send() receives the committed guess.
export class Question {
  constructor(send) {
    this.send = send;
    this.root = h("div", { class: "dk-asked" });
    [this.typed, this.changing] = [null, false];
  }

  show(picture) {
    this.picture = picture;
    this.changing &&= picture.status === "refused";
    this.#draw();
  }

  #draw() {
    const { question, choices, guess, final, status, note } = this.picture;
    const open = !final && (this.changing || !guess);
    const value = open ? this.typed ?? guess : guess;
    const refused = status === "refused" ? "true" : null;
    const hadFocus = this.root.contains(document.activeElement);
    // keys must not reach JupyterLab, where M, for example, changes the cell type
    const attributes = { disabled: open ? null : "", "data-lm-suppress-shortcuts": "" };
    const field = choices.length
      ? h("div", { class: "dk-choices", role: "radiogroup", "aria-label": question },
        choices.map((choice) => h("label", {}, h("input", { ...attributes, name, type: "radio",
          value: choice, checked: choice === value ? "" : null }), h("span", {}, formatted(choice)))))
      : h("input", { ...attributes, name, type: "text", value, autocomplete: "off",
        "aria-invalid": refused, "aria-label": "your guess", placeholder: "your guess" });
    this.button = h("button", { ...attributes, type: "submit" }, open ? "Commit" : "Committed");
    const change = guess && !open && !final
      ? h("button", { type: "button", class: "dk-change", onclick: () => this.#change() }, "Change")
      : null;
    const onkeydown = (e) => { // keys must not move the focus to the active cell, either
      e.stopPropagation();
      if (e.key !== "Enter" || e.target.tagName === "BUTTON") return;
      e.preventDefault();
      e.currentTarget.requestSubmit();
    };
    const statusLine = h("p", { class: `dk-note dk-${status}`, role: "status" },
      this.changing && !refused ? "" : formatted(note));
    this.root.replaceChildren(
      h("p", { class: "dk-question" }, formatted(question)),
      h("form", { onsubmit: (e) => this.#commit(e), onkeydown, oninput: () => refused && statusLine.replaceChildren(), novalidate: "", hidden: final && !guess ? "" : null },
        field, this.button, change, refused ? statusLine : null),
      refused ? "" : statusLine);
    if (hadFocus && open) this.focus();
  }

  focus() {
    this.root.querySelector("input:checked, input:enabled")?.focus();
  }

  #change() {
    this.changing = true;
    this.typed = null;
    this.#draw();
    this.focus();
  }

  #commit(event) {
    event.preventDefault();
    this.button.disabled = true; // until the kernel, which may be busy, has received it
    this.typed = new FormData(event.target).get(name) ?? "";
    this.send(this.typed);
  }
}

export class Prediction extends Follower {
  constructor(model, el) {
    super(model);
    this.question = new Question((guess) => model.send({ guess }));
    this.root = h("figure", { class: "distkit-prediction" }, this.question.root);
    el.append(this.root);
    this.update(model.get("picture"));
  }

  update(picture) {
    this.question.show(picture);
  }
}
