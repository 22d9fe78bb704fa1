// The timeline in the browser: combines the parts and handles user input.
// Stand-alone pages pass a model that has only the methods get, on and off.

import { altText, heading, legend, notices, totals } from "./frame.js";
import { fit } from "./canvas.js";
import { applyTheme, styleOf } from "./colors.js";
import { h, liveRegion, reducedMotion } from "./dom.js";
import { Follower } from "./follower.js";
import { listen, Viewport } from "./gestures.js";
import { Layout, MAX_HEIGHT } from "./layout.js";
import { Lenses } from "./lenses.js";
import { clamp } from "./numbers.js";
import { cursor, emptyMessage, dimLater, rangeBar } from "./overlay.js";
import { Renderer } from "./renderer.js";
import { Store } from "./store.js";
import { placeTip, card, sentence } from "./tooltip.js";

const KEYS = "The left and right arrow keys pan, plus and minus zoom, 0 shows the whole run, " +
  "the up and down arrow keys step through operations, Escape clears the selection, " +
  "slash finds operations, and w shows waiting time.";

// Updates during a run are limited, because the ranks need the CPU.
const GROWTH_PERIOD = 250; // time between two updates of growing open bars [ms]
const TEXT_PERIOD = 500; // minimum time between two updates of the text around the picture [ms]
const MANY_BARS = 150; // average number of bars per row above which rows have SUMS_HEIGHT
const SUMS_HEIGHT = 36; // height of rows that may be drawn as sums [px]
const SUMS = "fraction of time in operations (pale: waiting); zoom in to see each operation";
const MANY_ARROWS = "a thin arrow may stand for several messages; zoom in to see each message";
const BARE_SIZES = { height: 240, min_gap: 8, tallest: 240 }; // sizes that leave space for questions [px]
const MAX_SILENCE = 600_000; // time without updates after which the kernel is presumed dead [ms]

export class Timeline extends Follower {
  // stepped: time stops between two moments of the run; onThemeChange: called with new colors;
  // Data: the class of its store.
  constructor(model, el, { stepped = false, onThemeChange = null, Data = Store } = {}) {
    const picture = model.get("picture");
    super(model);
    Object.assign(this, { stepped, onThemeChange, theme: picture.theme, dimmedAfter: null });
    this.store = new Data(picture);
    [this.updates, this.updatedAt] = [picture.updates, performance.now()];
    [this.chosen, this.hovered, this.pointer] = [null, null, null];
    this.viewport = new Viewport(this, () => this.#all());
    this.#build(el);
    this.#listen();
    this.scheduleFrame();
  }

  // -- elements -------------------------------------------------------------------

  #build(el) {
    this.canvas = h("canvas",
      { tabindex: 0, role: "application", "aria-roledescription": "timeline" });
    this.tip = h("div", { class: "dk-tip", popover: "manual", role: "tooltip" });
    this.liveRegion = liveRegion();
    const part = (tag, name) => [name, h(tag, { class: `dk-${name}` })];
    this.parts = Object.fromEntries([part("div", "head"), part("ul", "notices"),
      part("ul", "legend"), part("div", "sums")]);
    this.stage = h("div", { class: "dk-stage" }, this.canvas);
    this.lenses = new Lenses(this.store, () => this.scheduleFrame());
    this.lenses.root.append(this.viewport.tools());
    this.root = h("figure", { class: "distkit-timeline" },
      h("header", {}, this.parts.head, this.parts.legend),
      this.lenses.root, this.parts.notices, this.stage, this.parts.sums, this.tip, this.liveRegion);
    el.append(this.root);
    this.context = this.canvas.getContext("2d");
  }

  renderText() {
    const { parts, store } = this;
    parts.head.replaceChildren(...heading(store.frame));
    parts.notices.replaceChildren(...notices(store.frame));
    parts.legend.replaceChildren(...legend(store));
    parts.sums.replaceChildren(...totals(store, (rank) => this.color(rank)));
    this.canvas.setAttribute("aria-label", `${altText(store)} ${KEYS}`);
  }

  color(rank) {
    return this.store.color(rank, this.style);
  }

  #updateStyle() {
    const before = this.style?.warning;
    this.style = styleOf(this.root, this.context, this.theme);
    if (this.style.warning === before) return;
    applyTheme(this.root, this.style);
    this.onThemeChange?.(this.style);
    this.renderText();
  }

  // Dims everything after this time; null dims nothing.
  dimAfter(time) {
    this.dimmedAfter = time;
    this.scheduleFrame();
  }

  // -- time -------------------------------------------------------------------------

  #now() {
    const { frame } = this.store;
    if (!this.#isRunning() || frame.end === null) return frame.end ?? 0;
    return frame.end + (reducedMotion() ? 0 : (performance.now() - this.updatedAt) / 1000);
  }

  #isRunning() {
    return this.store.frame.live && !this.stepped;
  }

  #all() {
    const { frame, open } = this.store;
    const [start, end] = [frame.start ?? 0, this.#now()];
    const span = Math.max(end - start, 1e-6);
    const margin = this.#isRunning() || !open.size ? 0.02 : this.stepped ? 0.3 : 0.12;
    return [start - 0.012 * span, start + (1 + margin) * span];
  }

  // -- drawing ------------------------------------------------------------------------

  frame() {
    this.#draw();
    clearTimeout(this.growing);
    if (this.#isGrowing()) this.growing = setTimeout(() => this.scheduleFrame(), GROWTH_PERIOD);
  }

  // Open bars grow until the kernel is presumed dead.
  #isGrowing() {
    return this.#isRunning() && !reducedMotion() && performance.now() - this.updatedAt < MAX_SILENCE;
  }

  #sizes() {
    const { sizes } = this.theme;
    const { count, tracks } = this.store;
    if (!count && !this.#isRunning() && !this.stepped) return { ...sizes, max_gap: sizes.min_gap };
    const row = count > MANY_BARS * tracks.length ? SUMS_HEIGHT : sizes.row;
    return { ...sizes, row, ...(this.store.frame.bare ? BARE_SIZES : {}) };
  }

  #draw() {
    const width = this.stage.clientWidth;
    if (!width) return; // not on the page yet, or hidden
    this.#updateStyle();
    const { context, canvas } = this;
    const view = this.viewport.shown;
    const end = this.#isRunning() ? this.#now() : Math.max(view[1], this.#all()[1]);
    context.font = `600 13px ${this.style.font}`;
    const measure = ({ name, detail }) =>
      Math.max(context.measureText(name).width, 0.9 * context.measureText(detail).width);
    this.layout = new Layout(this.store, this.#sizes(), width, view, end, measure);
    fit(canvas, width, this.layout.height);
    if (this.layout.height > MAX_HEIGHT) this.layout.foot = this.stage.scrollTop + MAX_HEIGHT;
    const focus = this.chosen ?? this.hovered;
    this.renderer = new Renderer(context, this.layout, this.style, focus, this.lenses);
    this.renderer.draw();
    this.lenses.hint(this.renderer.summed ? SUMS : this.renderer.many ? MANY_ARROWS : "");
    if (this.dimmedAfter !== null) dimLater(this);
    if (this.pointer) cursor(this);
    if (this.viewport.zoomed) rangeBar(this, view, this.#all());
    this.gestures.follow(this.layout, view, this.#all());
    if (!this.store.count) emptyMessage(this);
    this.root.dataset.drawn = this.store.frame.end ?? "";
    this.root.dataset.taken = this.updates;
  }

  // -- user input ------------------------------------------------------------------------

  #listen() {
    this.gestures = listen(this, this.canvas, {
      hit: (x, y) => this.layout.hit(x, y, this.renderer.arrows), edges: () => this.layout,
      onMove: (...pointer) => { this.pointer = pointer; }, onKey: (e) => this.onKey(e),
    });
    this.on(this.lenses.root, "keydown", (e) => this.#onSearchKey(e));
    this.on(this.stage, "scroll", () => this.scheduleFrame());
    this.watch(this.stage);
  }

  update(picture) {
    this.store.load(picture);
    [this.updates, this.updatedAt] = [picture.updates, performance.now()];
    if (!this.style) return;
    const { id } = this.chosen ?? {};
    if (id) this.chosen = this.store.find(id) ?? null; // indices have changed
    const delay = this.#isRunning() ? (this.textUpdated ?? -TEXT_PERIOD) + TEXT_PERIOD - performance.now() : 0;
    if (delay <= 0) this.#updateText();
    else this.textTimer ??= setTimeout(() => this.#updateText(), delay);
  }

  #updateText() {
    clearTimeout(this.textTimer);
    if (this.disposed) return;
    [this.textTimer, this.textUpdated] = [null, performance.now()];
    this.renderText();
    this.lenses.refresh();
  }

  onKey(e) {
    const own = { ...this.viewport.keys(), Escape: () => this.choose(null),
      ArrowDown: () => this.#step(1), ArrowUp: () => this.#step(-1) };
    return own[e.key] ?? this.lenses.key(e.key);
  }

  // In the search field, Enter steps through the matches, and Escape returns to the picture.
  #onSearchKey(e) {
    e.stopPropagation();
    if (e.key === "Escape") {
      if (this.lenses.active) this.lenses.toggle(this.lenses.active);
      this.canvas.focus({ preventScroll: true });
    } else if (e.key === "Enter" && e.target === this.lenses.input) this.#step(e.shiftKey ? -1 : 1);
  }

  // Steps through the operations, sorted by start.
  #step(by) {
    const order = this.store.ordered();
    if (!order.length) return;
    const before = by > 0 ? -1 : order.length;
    const at = this.chosen?.i === undefined ? before : order.indexOf(this.chosen.i);
    let next = clamp(at + by, 0, order.length - 1);
    const { highlighted } = this.lenses; // skip operations that are not highlighted
    if (highlighted) {
      while (order[next] !== undefined && !highlighted.bars.has(order[next])) next += by;
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
    this.liveRegion.textContent = item ? this.sentence(item) : "";
    this.showTip(item, x, y);
    this.scheduleFrame();
  }

  showTip(item, x, y) {
    const { tip } = this;
    if (!item) return tip.hidePopover();
    const color = this.color(item.rank ?? item.src);
    tip.replaceChildren(...card(item, this.store, color).filter(Boolean), ...this.extraDetails(item));
    placeTip(tip, x, y);
  }

  sentence(item) {
    return sentence(item, this.store);
  }

  // Additional elements of an item's tooltip.
  extraDetails() {
    return [];
  }
}
