// Several runs on one timeline, side by side or overlaid, and their differences in figures.

import { Choice } from "./beside.js";
import { h, press, toggles } from "./dom.js";
import { Marks } from "./marks.js";
import { grouped, humanSeconds, plural } from "./numbers.js";
import { call } from "./painter.js";
import { Runs } from "./runs.js";
import { Timeline } from "./timeline.js";

const PILL = ["overlaid", "o", "Overlaid", "the lanes of each rank one under the other"];
const KEYS = " o overlays the runs, b selects the next baseline.";
const SMALL = { row: 15, mark: 13, gap: 2, pad: 3, min_gap: 5, max_gap: 44, max_rows: 70 };
const LARGE = 1.2; // times their own size
const [MOST_BESIDE, WIDE] = [3, 820]; // so many runs have their figures beside them, if so wide
const [ROOM, HEAD] = [440, 20]; // pixels of all lanes then, and of the name above some

export class Compare extends Timeline {
  constructor(model, el) {
    super(model, el, { Data: Runs });
    const { store, parts } = this;
    const { runs, baseline } = store.frame;
    Object.assign(this, { baseline, unfolded: false, drawn: 0 });
    this.root.classList.add("distkit-compare", "distkit-values");
    this.pills = toggles([PILL], () => this.toggle());
    this.lenses.root.prepend(this.pills.overlaid);
    [this.table, this.losses] = [new Marks("dkc-table"), new Marks("dkc-losses")];
    for (const { root } of [this.table, this.losses]) {
      root.removeAttribute("aria-hidden");
      root.setAttribute("role", "img");
    }
    this.choice = new Choice("compared to", (name) => this.base(runs.indexOf(name)));
    this.fold = h("button", { type: "button", class: "dkc-fold", onclick: () => {
      this.unfolded = !this.unfolded;
      this.figures();
    } });
    const tools = h("div", { class: "dkc-tools" }, "compared to", this.choice.root, this.fold);
    const both = h("div", { class: "dkc-both" });
    this.stage.replaceWith(both);
    both.append(this.stage, h("div", { class: "dkc-figures" }, tools, this.table.root));
    parts.sums.replaceWith(this.losses.root);
    this.built = true;
    if (this.look) this.words();
  }

  // -- the figures --------------------------------------------------------------------------

  words() {
    if (!this.built) return;
    const { frame } = this.store;
    const turned = (words) => (frame.said.includes(words) ? frame.said[this.baseline] : words);
    for (const name of ["notices", "notes"]) frame[name] = frame[name].map(turned);
    super.words();
    this.canvas.setAttribute("aria-label", this.canvas.getAttribute("aria-label") + KEYS);
    this.losses.root.toggleAttribute("hidden", !frame.losses);
    if (frame.losses) this.show(this.losses, frame.losses, frame.losses.said);
    this.figures();
  }

  show(marks, scene, said) {
    marks.load(scene, this.store.frame.styles);
    marks.draw(0, -1);
    marks.root.style.maxWidth = `${LARGE * scene.width}px`;
    marks.root.setAttribute("aria-label", said);
  }

  figures() {
    const { table, fold, unfolded, choice, baseline, store: { frame } } = this;
    const { runs, figures, first, tables } = frame;
    this.show(table, figures, tables[baseline]);
    table.hide(runs.map((_, n) => n + 1).filter((layer) => layer !== baseline + 1));
    const height = unfolded ? figures.height : first;
    table.root.setAttribute("viewBox", `0 0 ${figures.width} ${height}`);
    choice.load(runs, runs[baseline]);
    fold.textContent = unfolded ? "fewer figures" : "all figures";
    fold.setAttribute("aria-expanded", String(unfolded));
    this.later();
  }

  base(n) {
    const { runs, said } = this.store.frame;
    this.baseline = n % runs.length;
    this.words();
    const words = [`compared to ${runs[this.baseline]}`, said[this.baseline]];
    this.spoken.textContent = words.filter(Boolean).join(": ");
  }

  // -- the lanes ----------------------------------------------------------------------------

  toggle() {
    this.choose(null);
    this.store.arrange(!this.store.overlaid);
    this.later();
  }

  manner() {
    const { lanes, overlaid } = this.store;
    return { ...this.look, bare: overlaid, lanes: new Map(lanes.map((l) => [l.rank, l.color])) };
  }

  color(rank) {
    const { ranks } = this.look;
    return ranks[(this.store.lanes.find((lane) => lane.rank === rank)?.color ?? 0) % ranks.length];
  }

  frame() {
    const { store, root } = this;
    const { lanes, runs } = store.frame;
    const beside = runs.length <= MOST_BESIDE && root.clientWidth > WIDE;
    root.toggleAttribute("data-beside", beside);
    const heads = HEAD * new Set(lanes.map(({ host }) => host)).size;
    const room = beside ? { height: ROOM - heads, tallest: ROOM - heads } : {};
    this.sized ??= this.theme;
    this.theme = { ...this.sized, sizes: { ...this.sized.sizes, ...SMALL, ...room } };
    super.frame();
    press(this.pills, () => store.overlaid);
    Object.assign(root.dataset, { layout: store.overlaid ? "overlaid" : "side",
      drawn: this.drawn += 1 });
  }

  typed(e) {
    if (e.key === "o") return () => this.toggle();
    return e.key === "b" ? () => this.base(this.baseline + 1) : super.typed(e);
  }

  // -- one operation, and those like it -------------------------------------------------------

  sentence(item) {
    const { store } = this;
    const own = `${store.frame.runs[this.runOf(item)]}: ${super.sentence(item)}`;
    return [own, ...this.others(item).map((words) => words.join(" "))].join("; ");
  }

  runOf({ i, send, recv }) {
    return this.store.run(i ?? (send ?? recv).i);
  }

  more(item) {
    const { store } = this;
    if (item.i === undefined) return [];
    const what = item.kind === "mark" ? "computation" : "operation";
    const nth = `${what} ${grouped(store.place(item.i))} of ${store.name(item.rank)}`;
    return [h("dl", { class: "dkc-others" }, h("dt", {}, store.frame.runs[this.runOf(item)]),
      h("dd", {}, nth), this.others(item).map(([name, ...words]) =>
        [h("dt", {}, name), h("dd", {}, words.join(", "))]))];
  }

  // For each other run its name, and the difference of its equivalent operation.
  others(item) {
    const { store } = this;
    if (item.i === undefined) return [];
    return store.alike(item.i).map((i, n) => {
      if (i === item.i) return null;
      const name = store.frame.runs[n];
      return i < 0 ? [name, "has none"] : [name, call(store.bar(i), store),
        ...apart(store.bar(i), item)];
    }).filter(Boolean);
  }
}

// How much later an operation begins than the hovered one, and how much longer it takes.
function apart(other, bar) {
  const later = other.start - bar.start;
  const words = [`at ${humanSeconds(other.start)}`,
    `${humanSeconds(Math.abs(later))} ${later < 0 ? "earlier" : "later"}`];
  if (other.end === null || bar.end === null) return words;
  const longer = other.end - other.start - (bar.end - bar.start);
  return [...words, `${humanSeconds(Math.abs(longer))} ${longer < 0 ? "shorter" : "longer"}`];
}
