// The timeline in the browser: combines the parts and handles user input.
// An anywidget module; a stand-alone page gives it a model with the same get and on.

import { alternative, heading, legend, notices, sums } from "./around.js";
import { fit } from "./canvas.js";
import { dress, lookOf } from "./colors.js";
import { h, spoken, still } from "./dom.js";
import { Follower } from "./follower.js";
import { listen, Viewport } from "./gestures.js";
import { Layout, TALLEST } from "./layout.js";
import { Lenses } from "./lenses.js";
import { clamp } from "./numbers.js";
import { cursor, emptiness, veil, whereabouts } from "./overlay.js";
import { Painter } from "./painter.js";
import { Store } from "./store.js";
import { beside, card, sentence } from "./tooltip.js";

const KEYS = "Arrow left and right pan, plus and minus zoom, 0 shows all, " +
  "arrow up and down go from operation to operation, Escape clears the selection, " +
  "slash finds, c shows the " +
  "critical path, w waiting time.";

// Minimum times between updates during a run, when the ranks need the processor [ms].
const GROWTH = 250; // of open bars
const RETELL = 500; // of the text around the picture
const MANY_BARS = 150; // average number in a row from which rows are higher, for their sums
const HIGHER = 36; // pixels
const SUMS = "the share of time in operations, waiting hatched; zoom in to see each one";
const BARE = { height: 240, min_gap: 8, tallest: 240 }; // pixels: questions stand below it
const PATIENCE = 600_000; // milliseconds without news

export class Timeline extends Follower {
  // stepped: time stands still between two moments of the run; onlook: called with new colours;
  // Data: the class of its store.
  constructor(model, el, { stepped = false, onlook = null, Data = Store } = {}) {
    const picture = model.get("picture");
    super(model);
    Object.assign(this, { stepped, onlook, theme: picture.theme });
    this.veil = null;
    this.store = new Data(picture);
    [this.updates, this.taken] = [picture.updates, performance.now()];
    [this.chosen, this.hovered, this.pointer] = [null, null, null];
    this.viewport = new Viewport(this, () => this.#all());
    this.#build(el);
    this.#listen();
    this.later();
  }

  // -- what is on the page --------------------------------------------------------

  #build(el) {
    this.canvas = h("canvas",
      { tabindex: 0, role: "application", "aria-roledescription": "timeline" });
    this.tip = h("div", { class: "dk-tip", popover: "manual", role: "tooltip" });
    this.spoken = spoken();
    const part = (tag, name) => [name, h(tag, { class: `dk-${name}` })];
    this.parts = Object.fromEntries([part("div", "head"), part("ul", "notices"),
      part("ul", "legend"), part("div", "sums")]);
    this.stage = h("div", { class: "dk-stage" }, this.canvas);
    this.lenses = new Lenses(this.store, () => this.later());
    this.lenses.root.append(this.viewport.tools());
    this.root = h("figure", { class: "distkit-timeline" },
      h("header", {}, this.parts.head, this.parts.legend),
      this.lenses.root, this.parts.notices, this.stage, this.parts.sums, this.tip, this.spoken);
    el.append(this.root);
    this.context = this.canvas.getContext("2d");
  }

  words() {
    const { parts, store } = this;
    parts.head.replaceChildren(...heading(store));
    parts.notices.replaceChildren(...notices(store));
    parts.legend.replaceChildren(...legend(store));
    parts.sums.replaceChildren(...sums(store, (rank) => this.color(rank)));
    this.canvas.setAttribute("aria-label", `${alternative(store)} ${KEYS}`);
  }

  color(rank) {
    const { ranks } = this.look;
    return ranks[(this.store.laneOf.get(rank) ?? 0) % ranks.length];
  }

  // How the painter draws.
  manner() {
    return this.look;
  }

  #relook() {
    const before = this.look?.warning;
    this.look = lookOf(this.root, this.context, this.theme);
    if (this.look.warning === before) return;
    dress(this.root, this.look);
    this.onlook?.(this.look);
    this.words();
  }

  // Later times are dimmed, null: none.
  until(time) {
    this.veil = time;
    this.later();
  }

  // -- time -------------------------------------------------------------------------

  #now() {
    const { frame } = this.store;
    if (!this.#runs() || frame.end === null) return frame.end ?? 0;
    return frame.end + (still() ? 0 : (performance.now() - this.taken) / 1000);
  }

  #runs() {
    return this.store.frame.live && !this.stepped;
  }

  #all() {
    const { frame, open } = this.store;
    const [start, end] = [frame.start ?? 0, this.#now()];
    const span = Math.max(end - start, 1e-6);
    const margin = this.#runs() || !open.size ? 0.02 : this.stepped ? 0.3 : 0.12;
    return [start - 0.012 * span, start + (1 + margin) * span];
  }

  // -- drawing ------------------------------------------------------------------------

  frame() {
    this.#draw();
    clearTimeout(this.growing);
    if (this.#grows()) this.growing = setTimeout(() => this.later(), GROWTH);
  }

  // Open bars grow by themselves, until a kernel must be supposed dead.
  #grows() {
    return this.#runs() && !still() && performance.now() - this.taken < PATIENCE;
  }

  #sizes() {
    const { sizes } = this.theme;
    const { count, tracks } = this.store;
    if (!count && !this.#runs() && !this.stepped) return { ...sizes, max_gap: sizes.min_gap };
    const row = count > MANY_BARS * tracks.length ? HIGHER : sizes.row;
    return { ...sizes, row, ...(this.store.frame.bare ? BARE : {}) };
  }

  #draw() {
    const width = this.stage.clientWidth;
    if (!width) return; // not on the page yet, or hidden
    this.#relook();
    const { context, canvas } = this;
    const view = this.viewport.shown;
    const end = this.#runs() ? this.#now() : Math.max(view[1], this.#all()[1]);
    context.font = `600 13px ${this.look.font}`;
    const measure = ({ name, detail }) =>
      Math.max(context.measureText(name).width, 0.9 * context.measureText(detail).width);
    this.layout = new Layout(this.store, this.#sizes(), width, view, end, measure);
    fit(canvas, width, this.layout.height);
    if (this.layout.height > TALLEST) this.layout.foot = this.stage.scrollTop + TALLEST;
    const focus = this.chosen ?? this.hovered;
    this.painter = new Painter(context, this.layout, this.manner(), focus, this.lenses);
    this.painter.draw();
    this.lenses.hint(this.painter.summed ? SUMS : "");
    if (this.veil !== null) veil(this);
    if (this.pointer) cursor(this);
    if (this.viewport.zoomed) whereabouts(this, view, this.#all());
    this.gestures.follow(this.layout, view, this.#all());
    if (!this.store.count) emptiness(this);
    this.root.dataset.drawn = this.store.frame.end ?? "";
    this.root.dataset.taken = this.updates;
  }

  // -- the reader ------------------------------------------------------------------------

  #listen() {
    this.gestures = listen(this, this.canvas, {
      hit: (x, y) => this.layout.hit(x, y, this.painter.arrows), scale: () => this.layout,
      moved: (...pointer) => { this.pointer = pointer; }, typed: (e) => this.typed(e),
    });
    this.on(this.lenses.root, "keydown", (e) => this.#sought(e));
    this.on(this.stage, "scroll", () => this.later());
    this.watch(this.stage);
  }

  take(picture) {
    this.store.load(picture);
    [this.updates, this.taken] = [picture.updates, performance.now()];
    if (!this.look) return;
    const { id } = this.chosen ?? {};
    if (id) this.chosen = this.store.find(id) ?? null; // numbers are new
    const wait = this.#runs() ? (this.told ?? -RETELL) + RETELL - performance.now() : 0;
    if (wait <= 0) this.#retell();
    else this.telling ??= setTimeout(() => this.#retell(), wait);
  }

  #retell() {
    clearTimeout(this.telling);
    if (this.gone) return;
    [this.telling, this.told] = [null, performance.now()];
    this.words();
    this.lenses.refresh();
  }

  typed(e) {
    const own = { ...this.viewport.keys(), Escape: () => this.choose(null),
      ArrowDown: () => this.#step(1), ArrowUp: () => this.#step(-1) };
    return own[e.key] ?? this.lenses.key(e.key);
  }

  // In the search field: Enter goes from match to match, Escape back to the picture.
  #sought(e) {
    e.stopPropagation();
    if (e.key === "Escape") {
      if (this.lenses.active) this.lenses.toggle(this.lenses.active);
      this.canvas.focus({ preventScroll: true });
    } else if (e.key === "Enter" && e.target === this.lenses.input) this.#step(e.shiftKey ? -1 : 1);
  }

  // Steps from operation to operation, sorted by start.
  #step(by) {
    const order = this.store.ordered();
    if (!order.length) return;
    const before = by > 0 ? -1 : order.length;
    const at = this.chosen?.i === undefined ? before : order.indexOf(this.chosen.i);
    let next = clamp(at + by, 0, order.length - 1);
    const { light } = this.lenses; // only what is bright
    if (light) {
      while (order[next] !== undefined && !light.bars.has(order[next])) next += by;
      if (order[next] === undefined) return;
    }
    const bar = this.store.bar(order[next]);
    this.viewport.seek(bar.start);
    this.#draw();
    const [x, y, , height] = this.layout.box(bar.i);
    const box = this.canvas.getBoundingClientRect();
    this.choose(bar, box.left + Math.max(x, this.layout.left) + 8, box.top + y + height);
  }

  choose(item, x, y) {
    this.chosen = item;
    this.spoken.textContent = item ? this.sentence(item) : "";
    this.tell(item, x, y);
    this.later();
  }

  tell(item, x, y) {
    const { tip } = this;
    if (!item) return tip.hidePopover();
    const color = this.color(item.rank ?? item.src);
    tip.replaceChildren(...card(item, this.store, color).filter(Boolean), ...this.more(item));
    beside(tip, x, y);
  }

  sentence(item) {
    return sentence(item, this.store);
  }

  // Further elements of an item's card.
  more() {
    return [];
  }
}
