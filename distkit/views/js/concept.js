// The questions of a concept check, one at a time, so that the picture above stays visible.

import { h } from "./dom.js";
import { Follower } from "./follower.js";
import { Question } from "./prediction.js";

const SIGNS = { pass: "✓", fail: "✗" };
const WORDS = { pass: ", right", fail: ", wrong" };

export class Concept extends Follower {
  constructor(model, el) {
    super(model);
    this.nav = h("nav", { class: "dk-nav", "aria-label": "questions" });
    this.root = h("figure", { class: "distkit-prediction distkit-concept" });
    this.views = this.picture.questions.map((_, number) =>
      new Question((guess) => model.send({ number, guess })));
    el.append(this.root);
    this.at = Math.max(0, this.picture.questions.findIndex(({ final }) => !final));
    this.update();
  }

  get picture() {
    return this.model.get("picture");
  }

  update() {
    const hadFocus = this.views[this.at].root.contains(document.activeElement);
    this.picture.questions.forEach((question, i) => this.views[i].show(question));
    this.#draw();
    if (hadFocus && this.picture.questions[this.at].final) this.next.focus();
  }

  #go(at) {
    this.at = at;
    this.#draw();
    this.nav.querySelector("[aria-current]").focus();
  }

  #draw() {
    const { at } = this;
    const { questions, score, again } = this.picture;
    const button = (words, onclick, props = {}) =>
      h("button", { type: "button", onclick, ...props }, words);
    const step = (words, to) =>
      button(words, () => this.#go(to), { disabled: questions[to] ? null : "" });
    const dots = questions.map(({ status }, i) =>
      button([i + 1, SIGNS[status] ?? ""].join(" ").trim(), () => this.#go(i), {
        class: `dk-dot-${status}`, "aria-current": i === at ? "true" : null,
        "aria-label": `question ${i + 1}${WORDS[status] ?? ""}` }));
    this.next = step("Next", at + 1);
    this.nav.replaceChildren(step("Back", at - 1), ...dots, this.next,
      h("b", { role: "status" }, score),
      again ? button("Try again", () => this.#again(), { class: "dk-again" }) : "");
    this.root.replaceChildren(this.views[at].root, this.nav);
  }

  #again() {
    this.at = this.picture.questions.findIndex(({ status }) => status !== "pass");
    this.views.forEach((question) => { question.typed = null; });
    this.model.send({ again: true });
  }
}
