// Several runs on one timeline, and a table of their metrics.

import { h } from "./dom.js";
import { Marks } from "./marks.js";
import { grouped, humanSeconds, plural } from "./numbers.js";
import { call } from "./renderer.js";
import { Runs } from "./runs.js";
import { Timeline } from "./timeline.js";

const SMALL_SIZES = { row: 15, mark: 13, gap: 2, pad: 3, min_gap: 5, max_gap: 44, max_rows: 70 };
const MAX_SCALE = 1.2; // maximum scale of the table
const MAX_SIDE_RUNS = 3; // maximum number of runs for which the table is next to the lanes
const MIN_SIDE_WIDTH = 820; // width of the view above which the table is next to the lanes [px]
const LANES_HEIGHT = 440; // height of lanes next to the table, including the runs' names [px]
const HEADING_HEIGHT = 20; // height of a run's name [px]

export class Compare extends Timeline {
  constructor(model, el) {
    super(model, el, { Data: Runs });
    const { store, parts } = this;
    this.drawn = 0;
    this.root.classList.add("distkit-compare", "distkit-values");
    this.table = new Marks("dkc-table");
    this.table.root.removeAttribute("aria-hidden");
    this.table.root.setAttribute("role", "img");
    const tools = h("div", { class: "dkc-tools" }, `compared to ${store.frame.runs[0]}`);
    const both = h("div", { class: "dkc-both" });
    this.stage.replaceWith(both);
    both.append(this.stage, h("div", { class: "dkc-figures" }, tools, this.table.root));
    parts.sums.remove();
    this.built = true;
    if (this.style) this.renderText();
  }

  // -- the table ----------------------------------------------------------------------------

  renderText() {
    if (!this.built) return;
    super.renderText();
    const { table, store: { frame: { figures, styles, table: text } } } = this;
    table.load(figures, styles);
    table.draw(0, -1);
    table.root.style.maxWidth = `${MAX_SCALE * figures.width}px`;
    table.root.setAttribute("aria-label", text);
  }

  // -- the lanes ----------------------------------------------------------------------------

  frame() {
    const { store, root } = this;
    const { lanes, runs } = store.frame;
    const beside = runs.length <= MAX_SIDE_RUNS && root.clientWidth > MIN_SIDE_WIDTH;
    root.toggleAttribute("data-beside", beside);
    root.style.setProperty("--runs", runs.length);
    const heads = HEADING_HEIGHT * new Set(lanes.map(({ host }) => host)).size;
    const limits = beside ? { height: LANES_HEIGHT - heads, tallest: LANES_HEIGHT - heads } : {};
    this.sized ??= this.theme;
    this.theme = { ...this.sized, sizes: { ...this.sized.sizes, ...SMALL_SIZES, ...limits } };
    super.frame();
    root.dataset.drawn = this.drawn += 1;
  }

  // -- matching operations --------------------------------------------------------------------

  sentence(item) {
    const { store } = this;
    const own = `${store.frame.runs[this.runOf(item)]}: ${super.sentence(item)}`;
    return [own, ...this.counterparts(item).map((words) => words.join(" "))].join("; ");
  }

  runOf(item) {
    return this.store.run(barOf(item).i);
  }

  // The tooltip covers the table, if it is next to the lanes, rather than other runs.
  showTip(item, x, y) {
    const edge = this.root.hasAttribute("data-beside") ? this.stage.getBoundingClientRect().right : 0;
    super.showTip(item, Math.max(x, edge), y);
  }

  extraDetails(shown) {
    const [{ store }, item] = [this, barOf(shown)];
    const what = item.kind === "mark" ? "computation" : "operation";
    const nth = `${what} ${grouped(store.position(item.i))} of ${store.name(item.rank)}`;
    return [h("dl", { class: "dkc-others" }, h("dt", {}, store.frame.runs[this.runOf(item)]),
      h("dd", {}, nth), this.counterparts(item).map(([name, ...words]) =>
        [h("dt", {}, name), h("dd", {}, words.join(", "))]))];
  }

  // For each other run: its name, and the matching operation with its time differences.
  counterparts(shown) {
    const [{ store }, item] = [this, barOf(shown)];
    return store.matching(item.i).map((i, n) => {
      if (i === item.i) return null;
      const name = store.frame.runs[n];
      return i < 0 ? [name, `no matching ${call(item, store)}`] : [name, call(store.bar(i), store),
        ...timeDifferences(store.bar(i), item)];
    }).filter(Boolean);
  }
}

// The bar of an item; for a message, its send or else its receive.
const barOf = (item) => (item.i === undefined ? item.send ?? item.recv : item);

// Describes how the start and the duration of an operation of another run differ from those of a bar.
function timeDifferences(other, bar) {
  const later = other.start - bar.start;
  const words = [`at ${humanSeconds(other.start)}`,
    later ? `${humanSeconds(Math.abs(later))} ${later < 0 ? "earlier" : "later"}` : "the same time"];
  if (other.end === null || bar.end === null) return words;
  const longer = other.end - other.start - (bar.end - bar.start);
  return [...words, `${humanSeconds(Math.abs(longer))} ${longer < 0 ? "shorter" : "longer"}`];
}
