// Ways to look at a run: find operations, the critical path, waiting time, before and after.
// Each leaves some operations bright; one at a time.

import { cone } from "./cone.js";
import { h, press, toggles } from "./dom.js";
import { grouped, humanSeconds, plural } from "./numbers.js";
import { call } from "./painter.js";
import { search, tally } from "./query.js";

const LENSES = [
  ["find", "/", "Find", "find operations: all_reduce, rank:2, group:tp, bytes>=4k, train.py:31"],
  ["critical", "c", "Critical path", "the chain of operations that determined the run's duration"],
  ["waiting", "w", "Waiting", "time spent waiting for the last rank to arrive"],
  ["cone", "h", "Before & after", "what happens before the chosen operation, and after it"],
];

const UNCHOSEN = { light: null, told: "choose an operation: click on it, or arrow down" };
const LATER = { light: null, told: "known once the run has ended" };

const NAMED = 3; // a critical path of so many operations is told one by one

// "rank 0: work (4 ms), send (1 ms); rank 1: work (2 ms)"; arrows tell to whom
function named(bars, store) {
  const sorted = [...bars].map((i) => store.bar(i)).sort((a, b) => a.start - b.start);
  return sorted.map((bar, n) => {
    const again = sorted[n - 1]?.rank === bar.rank;
    const before = again ? ", " : `${n ? "; " : ""}${store.name(bar.rank)}: `;
    const took = bar.end === null ? "not finished" : humanSeconds(bar.end - bar.start);
    const what = ["send", "recv"].includes(bar.kind) ? bar.op : call(bar, store);
    return `${before}${what} (${took})`;
  }).join("");
}

export class Lenses {
  // onchange(): what is bright has changed; chosen(): the operation that is chosen.
  constructor(store, onchange, chosen) {
    Object.assign(this, { store, onchange, chosen, active: null, light: null, waits: null });
    this.buttons = toggles(LENSES, (name) => this.toggle(name));
    this.input = h("input", { type: "search", hidden: "", spellcheck: "false",
      "aria-label": LENSES[0][3], placeholder: "all_reduce rank:2 bytes>=4k",
      oninput: () => this.#apply() });
    this.told = h("span", { class: "dk-told", role: "status" });
    this.root = h("div", { class: "dk-lenses" },
      Object.values(this.buttons), this.input, this.told);
    press(this.buttons, () => false);
  }

  // What a key does, if it is one of ours.
  key(key) {
    const lens = LENSES.find(([, its]) => its === key);
    return lens && (() => this.toggle(lens[0]));
  }

  toggle(name) {
    this.active = this.active === name ? null : name;
    press(this.buttons, (its) => its === this.active);
    this.input.hidden = this.active !== "find";
    if (this.active === "find") this.input.focus({ preventScroll: true });
    this.#apply();
  }

  // What is told while no lens is chosen.
  hint(words) {
    if (!this.active && this.told.textContent !== words) this.told.textContent = words;
  }

  // The data or the choice changed.
  refresh() {
    if (this.active) this.#apply();
  }

  #apply() {
    const { store } = this;
    [this.light, this.waits] = [null, null];
    this.told.textContent = "";
    const found = this.active && this[`_${this.active}`](store);
    if (found) {
      this.light = found.light;
      this.told.textContent = found.told;
    }
    this.onchange();
  }

  _find(store) {
    if (!this.input.value.trim()) return null;
    const light = search(store, this.input.value);
    return { light, told: tally(light, store) };
  }

  _critical(store) {
    if (!store.causes) return LATER;
    const light = store.causes.critical;
    return { light, told: this.#chain(light, store) };
  }

  // A short path operation by operation, a long one in numbers.
  #chain({ bars, ends }, store) {
    if (bars.size && bars.size <= NAMED) return named(bars, store);
    const ranks = new Set([...bars, ...ends.keys()].map((i) => store.lane(i))).size;
    return `${plural(bars.size, "operation")} on ${plural(ranks, "rank")}`;
  }

  _waiting(store) {
    if (!store.causes) return LATER;
    this.waits = store.causes.waits;
    const { start, end, lanes } = store.frame;
    const sum = lanes.reduce((seconds, { waiting }) => seconds + waiting * (end - start), 0);
    const light = { bars: new Set(this.waits.keys()), arrows: new Set() };
    return { light, told: `${humanSeconds(sum)} on all ranks together` };
  }

  _cone(store) {
    const bar = this.chosen();
    if (bar?.i === undefined) return UNCHOSEN;
    const { past, future } = cone(store, bar.i);
    const arrows = new Set();
    for (let a = 0; a < store.arrows; a++) {
      const [s, r] = [store.send[a], store.recv[a]];
      const both = (side) => (side.has(s) || s === bar.i) && (side.has(r) || r === bar.i);
      if (both(past) || both(future)) arrows.add(a);
    }
    const told = `${plural(past.size, "operation")} before it, ${grouped(future.size)} after it`;
    return { light: { bars: new Set([...past, ...future, bar.i]), arrows }, told };
  }
}
