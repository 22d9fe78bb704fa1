// A view as a sheet: heading, notices, and a body that is drawn anew from the picture.

import { dress, lookOf } from "./colors.js";
import { button, h, obey, spoken } from "./dom.js";
import { Follower } from "./follower.js";
import { clamp } from "./numbers.js";

// A subclass has build(), merge(patch) and draw().
export class Sheet extends Follower {
  constructor(model, el, name, aria) {
    const picture = model.get("picture");
    super(model, picture.next ?? 0);
    Object.assign(this, { picture, theme: picture.theme });
    this.head = h("div", { class: "dk-head" });
    this.tools = h("div", { class: "dkv-values-tools" });
    this.notices = h("ul", { class: "dk-notices" });
    this.body = h("div", { class: "dkv-body" });
    this.spoken = spoken();
    this.scratch = h("canvas").getContext("2d");
    const kinds = `distkit-timeline distkit-values distkit-${name}`;
    this.root = h("figure", { class: kinds, "aria-label": aria },
      h("header", {}, this.head, this.tools), this.notices, this.body, this.spoken);
    el.append(this.root);
    this.build();
    this.watch();
    this.drain();
    this.later();
  }

  frame() {
    if (!this.root.clientWidth) return; // not on the page yet, or hidden
    this.look = lookOf(this.root, this.scratch, this.theme);
    dress(this.root, this.look);
    const { title, facts, live, notices, notes = [] } = this.picture;
    this.head.replaceChildren(h("strong", {}, title || this.constructor.name),
      h("span", { class: "dk-facts" }, facts.join(" · ")),
      live ? h("span", { class: "dk-live" }, "live") : "");
    this.notices.replaceChildren(...notices.map((words) =>
      h("li", { class: notes.includes(words) ? "dkv-note" : null }, words)));
    this.draw();
    this.root.dataset.drawn = String((Number(this.root.dataset.drawn) || 0) + 1);
  }

  color(lane) {
    return this.look.ranks[lane % this.look.ranks.length];
  }

  // So many columns of at least this width fit: [their number, the width of each].
  columns(most, least, gap, room = this.body.clientWidth) {
    const across = clamp(Math.floor((room + gap) / (least + gap)), 1, Math.max(1, most));
    return [across, (room - gap * (across - 1)) / across];
  }
}

// A sheet of things one after the other, of which one is shown: a slider and the keys go along
// them. A subclass has list, nameOf(thing), passed(thing): at the chosen one or after it, and
// sentence(thing, at).
export class Series extends Sheet {
  // noun: what they are.
  slides(noun) {
    Object.assign(this, { chosen: null, follow: this.picture.live });
    this.slider = h("input", { type: "range", class: "dkv-slider", min: 0, step: 1,
      "aria-label": noun, oninput: () => this.go(Number(this.slider.value)) });
    this.arrows = h("div", { class: "dk-tools" },
      button(`previous ${noun}`, "◀", () => this.step(-1)),
      button(`next ${noun}`, "▶", () => this.step(1)));
    this.on(this.root, "keydown", (e) => {
      if (this.list.length && e.target.tagName !== "SELECT") obey(e, this.keys()[e.key]);
    });
  }

  get at() {
    const { list, chosen, follow } = this;
    if (chosen === null) return follow ? list.length - 1 : 0;
    const found = list.findIndex((one) => this.passed(one));
    return found < 0 ? list.length - 1 : found;
  }

  go(position) {
    const { list } = this;
    const at = clamp(position, 0, list.length - 1);
    this.follow = this.picture.live && at === list.length - 1;
    this.chosen = this.follow || !list[at] ? null : this.nameOf(list[at]);
    this.say();
  }

  step(by) {
    this.go(this.at + by);
  }

  // Something else is shown.
  say() {
    const { list, at } = this;
    this.spoken.textContent = list[at] ? this.sentence(list[at], at) : "";
    this.later();
  }

  slide() {
    const { list, at, slider } = this;
    Object.assign(slider, { max: list.length - 1, value: at });
    slider.setAttribute("aria-valuetext", this.sentence(list[at], at));
  }

  keys() {
    return { ArrowLeft: () => this.step(-1), ArrowRight: () => this.step(1),
      Home: () => this.go(0), End: () => this.go(this.list.length - 1) };
  }
}
