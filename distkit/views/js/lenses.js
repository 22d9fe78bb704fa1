// Lenses highlight some operations of a run: the matches of a search, or waiting time. At most one
// lens is active.

import { h, press, toggles } from "./dom.js";
import { grouped, humanSeconds, plural } from "./numbers.js";

const LENSES = [
  ["find", "/", "Find", "Find operations by name, line, label or rank"],
  ["waiting", "w", "Waiting", "Highlight the time that ranks spend waiting for others"],
];

// The operations whose name, line, label or rank contains this text: {bars, arrows}; an arrow
// matches if either of its ends does.
export function search(store, text) {
  const pattern = text.toLowerCase().trim();
  const has = (value) => value?.toLowerCase().includes(pattern);
  const matches = store.categories.map(({ op, where, label }) => [op, where, label].some(has));
  const lanes = store.tracks.map(({ rank }) => has(store.name(rank)));
  const [bars, arrows] = [new Set(), new Set()];
  for (let i = 0; i < store.count; i++) {
    if (matches[store.category[i]] || lanes[store.track[i]]) bars.add(i);
  }
  for (let a = 0; a < store.arrows; a++) {
    if (bars.has(store.send[a]) || bars.has(store.recv[a])) arrows.add(a);
  }
  return { bars, arrows };
}

export class Lenses {
  // onchange() is called when the highlighted operations have changed.
  constructor(store, onchange) {
    Object.assign(this, { store, onchange, active: null, highlighted: null, waits: null });
    this.buttons = toggles(LENSES, (name) => this.toggle(name));
    this.input = h("input", { type: "search", hidden: "", spellcheck: "false",
      "aria-label": LENSES[0][3], placeholder: "send, train.py:31, rank 2",
      oninput: () => this.#apply() });
    this.status = h("span", { class: "dk-lens-status", role: "status" });
    this.root = h("div", { class: "dk-lenses" },
      Object.values(this.buttons), this.input, this.status);
    press(this.buttons, () => false);
    this.refresh();
  }

  // The action of a key, if a lens uses it.
  key(key) {
    const lens = LENSES.find(([, shortcut]) => shortcut === key);
    return lens && !this.buttons[lens[0]].hidden && (() => this.toggle(lens[0]));
  }

  toggle(name) {
    this.active = this.active === name ? null : name;
    press(this.buttons, (lens) => lens === this.active);
    this.input.hidden = this.active !== "find";
    if (this.active === "find") this.input.focus({ preventScroll: true });
    this.#apply();
  }

  // Shows a hint while no lens is active.
  hint(text) {
    if (!this.active && this.status.textContent !== text) this.status.textContent = text;
  }

  // Called when the data has changed.
  refresh() {
    this.buttons.waiting.hidden = !this.store.waits; // until the run has ended
    if (this.active) this.#apply();
  }

  #apply() {
    const { store } = this;
    [this.highlighted, this.waits] = [null, null];
    this.status.textContent = "";
    const result = this.active && this[`_${this.active}`](store);
    if (result) {
      this.highlighted = result.highlighted;
      this.status.textContent = result.text;
    }
    this.onchange();
  }

  _find(store) {
    if (!this.input.value.trim()) return null;
    const highlighted = search(store, this.input.value);
    const total = plural(store.count, "operation");
    return { highlighted, text: `${grouped(highlighted.bars.size)} of ${total}` };
  }

  _waiting(store) {
    this.waits = store.waits;
    const { start, end, lanes } = store.frame;
    const sum = lanes.reduce((seconds, { waiting }) => seconds + waiting * (end - start), 0);
    const highlighted = { bars: new Set(this.waits.keys()), arrows: new Set() };
    return { highlighted, text: `${humanSeconds(sum)} in total on all ranks` };
  }
}
