// The timeline in the browser: puts the pieces together and answers the reader.
// An anywidget module; a stand-alone page gives it a model with the same get and on.

import { alternative, heading, legend, notices, sums } from "./around.js";
import { fit } from "./canvas.js";
import { h, still } from "./dom.js";
import { Lenses } from "./lenses.js";
import { Layout, TALLEST } from "./layout.js";
import { Gestures, sideways, Viewport } from "./gestures.js";
import { Minimap } from "./minimap.js";
import { clamp } from "./numbers.js";
import { cursor, emptiness, veil, whereabouts } from "./overlay.js";
import { lookOf } from "./look.js";
import { Painter } from "./painter.js";
import { onTheme } from "./repaint.js";
import { Store } from "./store.js";
import { beside, card, sentence } from "./tooltip.js";

const KEYS = "Arrow left and right pan, plus and minus zoom, 0 shows all, " +
  "arrow up and down go from operation to operation, Escape lets go, slash finds, c shows the " +
  "critical path, w waiting time, h what happens before and after the chosen operation.";

// While a run goes on the ranks need the processor as well: open bars grow so often by themselves,
const GROWTH = 250; // milliseconds
const RETELL = 500; // and the words around the picture change so often
const LONG = 1000; // operations: then the whole run lies small under the picture
const MANY_BARS = 150; // in a row, on average: then rows are higher, for their sums
const HIGHER = 36; // pixels
const SUMS = "how much of the time is in operations, waiting pale; zoom in to see each";
const PATIENCE = 600_000; // milliseconds without news

export class Timeline {
  // stepped: time stands still between two moments of the run; onlook: told of new colours.
  constructor(model, el, { stepped = false, onlook = null } = {}) {
    const picture = model.get("picture");
    Object.assign(this, { model, stepped, onlook, theme: picture.theme, next: picture.next ?? 0 });
    [this.veil, this.range, this.whole] = [null, null, false];
    this.store = new Store(picture);
    this.merged = performance.now();
    [this.chosen, this.hovered, this.pointer] = [null, null, null];
    this.viewport = new Viewport({ all: () => this.#all(), rest: () => this.#followed() ?? this.#all(),
      reset: () => this.#reset(), onchange: () => this.#later() });
    this.#build(el);
    this.#listen();
    this.#drain();
    const { opening, end } = this.store.frame;
    const part = opening && !stepped ? end - opening : 0;
    if (part) this.viewport.zoomed = [opening - 0.03 * part, end + 0.02 * part];
  }

  // -- what is on the page --------------------------------------------------------

  #build(el) {
    this.canvas = h("canvas", { tabindex: 0, role: "application", "aria-roledescription": "timeline" });
    this.tip = h("div", { class: "dk-tip", popover: "manual", role: "tooltip" });
    this.spoken = h("p", { class: "dk-spoken", "aria-live": "polite" });
    this.parts = Object.fromEntries(["head", "notices", "legend", "sums"].map((name) =>
      [name, h(name === "legend" || name === "notices" ? "ul" : "div", { class: `dk-${name}` })]));
    this.stage = h("div", { class: "dk-stage" }, this.canvas);
    this.map = new Minimap((time) => this.viewport.center(time));
    this.lenses = new Lenses(this.store, () => this.#later(), () => this.chosen);
    this.lenses.root.append(this.viewport.tools());
    this.root = h("figure", { class: "distkit-timeline" },
      h("header", {}, this.parts.head, this.parts.legend),
      this.lenses.root, this.parts.notices, this.stage, this.parts.sums, this.tip, this.spoken);
    el.append(this.root);
    this.context = this.canvas.getContext("2d");
  }

  #words() {
    const { parts, store } = this;
    parts.head.replaceChildren(...heading(store));
    parts.notices.replaceChildren(...notices(store));
    parts.legend.replaceChildren(...legend(store));
    parts.sums.replaceChildren(...sums(store, (rank) => this.#color(rank)));
    this.canvas.setAttribute("aria-label", `${alternative(store)} ${KEYS}`);
  }

  #color(rank) {
    const { ranks } = this.look;
    return ranks[(this.store.laneOf.get(rank) ?? 0) % ranks.length];
  }

  #relook() {
    const before = this.look?.warning;
    this.look = lookOf(this.root, this.context, this.theme);
    if (this.look.warning === before) return;
    this.root.style.setProperty("--dk-warning", this.look.warning);
    this.root.style.setProperty("--dk-rank", this.look.ranks[0]);
    this.onlook?.(this.look);
    this.#words();
  }

  // What is later lies under a veil, null: nothing; range: the part to show by default.
  until(time, range) {
    [this.veil, this.range] = [time, range];
    this.#later();
  }

  // -- time -------------------------------------------------------------------------

  #now() {
    const { frame } = this.store;
    if (!this.#runs() || frame.end === null) return frame.end ?? 0;
    return frame.end + (still() ? 0 : (performance.now() - this.merged) / 1000);
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

  #followed() {
    if (!this.range || this.whole) return null;
    const [from, to] = this.range;
    const span = Math.max(to - from, 1e-6);
    const margin = this.veil === null && this.store.open.size ? 0.3 : 0.03;
    return [from - 0.012 * span, from + (1 + margin) * span];
  }

  #reset() {
    if (this.range) { // between the part and all of it
      if (!this.viewport.zoomed) this.whole = !this.whole;
      this.viewport.zoomed = null;
      return this.#later();
    }
    this.viewport.glide(this.#all());
  }

  // -- drawing ------------------------------------------------------------------------

  #later() {
    if (this.pending || this.gone) return;
    this.pending = requestAnimationFrame(() => {
      this.pending = null;
      this.#draw();
      clearTimeout(this.growing);
      if (this.#grows()) this.growing = setTimeout(() => this.#later(), GROWTH);
    });
  }

  // Open bars grow by themselves, until a kernel must be supposed dead.
  #grows() {
    return this.#runs() && !still() && performance.now() - this.merged < PATIENCE;
  }

  #sizes() {
    const { sizes } = this.theme;
    const { count, tracks } = this.store;
    if (!count && !this.#runs() && !this.stepped) return { ...sizes, max_gap: sizes.min_gap };
    return count > MANY_BARS * tracks.length ? { ...sizes, row: HIGHER } : sizes;
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
    this.painter = new Painter(context, this.layout, this.look, this.chosen ?? this.hovered, this.lenses);
    this.painter.draw();
    this.lenses.hint(this.painter.summed ? SUMS : "");
    if (this.veil !== null) veil(this);
    if (this.pointer) cursor(this);
    const long = this.store.count >= LONG;
    if (long && !this.map.canvas.isConnected) this.stage.after(this.map.canvas);
    if (long) this.map.draw(this.painter.sketch(), this.#all(), view);
    else if (this.viewport.zoomed || this.#followed()) whereabouts(this, view, this.#all());
    this.gestures.follow(this.layout, view, this.#all());
    if (!this.store.count) emptiness(this);
    this.root.dataset.drawn = this.store.frame.end ?? "";
    this.root.dataset.taken = this.next; // so many patches are in the picture
  }

  // -- the reader ------------------------------------------------------------------------

  #listen() {
    const on = (target, type, act, options) => {
      target.addEventListener(type, act, { signal: this.stop.signal, ...options });
    };
    this.stop = new AbortController();
    this.gestures = new Gestures(this.canvas, (e) => this.viewport.takes(e), (view) => {
      this.#tell(null);
      this.viewport.show(view);
    });
    on(this.canvas, "pointermove", (e) => this.#moved(e));
    on(this.canvas, "pointerdown", (e) => this.#pressed(e));
    on(this.canvas, "pointerup", (e) => this.#released(e));
    on(this.canvas, "pointerleave", () => this.#left());
    on(this.canvas, "dblclick", () => this.#reset());
    on(this.canvas, "wheel", (e) => this.#along(e), { passive: false });
    on(this.canvas, "keydown", (e) => this.#typed(e));
    on(this.lenses.root, "keydown", (e) => this.#sought(e));
    on(this.canvas, "blur", () => this.#choose(null));
    on(this.stage, "scroll", () => this.#later());
    on(window, "wheel", (e) => { if (e.target !== this.canvas) this.viewport.armed = false; }, { passive: true });
    for (const type of ["transitionrun", "transitionend", "transitioncancel"])
      on(this.root, type, () => this.#later());
    onTheme(() => this.#later(), this.stop.signal);
    this.resized = new ResizeObserver(() => this.#later());
    this.resized.observe(this.stage);
    this.changed = () => this.#drain();
    this.model.on("change", this.changed);
  }

  // Patches lie on the model under a number each, so that none is lost before we look.
  #drain() {
    let patch, any = false;
    while ((patch = this.model.get(`patch${this.next}`))) {
      this.store.merge(patch);
      [this.merged, any] = [performance.now(), true];
      this.next += 1;
    }
    if (!any || !this.look) return;
    if (this.chosen?.id) this.chosen = this.store.find(this.chosen.id) ?? null; // numbers may be new
    const wait = this.#runs() ? (this.told ?? -RETELL) + RETELL - performance.now() : 0;
    if (wait <= 0) this.#retell();
    else this.telling ??= setTimeout(() => this.#retell(), wait);
    this.#later();
  }

  #retell() {
    clearTimeout(this.telling);
    if (this.gone) return;
    [this.telling, this.told] = [null, performance.now()];
    this.#words();
    this.lenses.refresh();
  }

  #at(e) {
    const box = this.canvas.getBoundingClientRect();
    return [e.clientX - box.left, e.clientY - box.top];
  }

  #moved(e) {
    this.viewport.armed ||= e.movementX !== 0 || e.movementY !== 0;
    this.pointer = this.#at(e);
    if (this.drag) return this.#dragged(e);
    const hit = this.layout?.hit(...this.pointer, this.painter.arrows) ?? null;
    this.canvas.style.cursor = hit ? "pointer" : "grab";
    this.hovered = hit;
    if (!this.chosen) this.#tell(hit, e.clientX, e.clientY);
    this.#later();
  }

  #pressed(e) {
    if (e.button !== 0) return;
    this.drag = { x: e.clientX, far: false };
  }

  #dragged(e) {
    this.drag.far ||= Math.abs(e.clientX - this.drag.x) > 4;
    if (!this.drag.far) return;
    this.canvas.style.cursor = "grabbing";
    this.#tell(null);
  }

  #released(e) {
    const click = this.drag && !this.drag.far;
    this.drag = null;
    if (click) this.#choose(this.layout.hit(...this.#at(e), this.painter.arrows), e.clientX, e.clientY);
  }

  #left() {
    [this.pointer, this.hovered, this.viewport.armed] = [null, null, false];
    if (!this.chosen) this.#tell(null);
    this.#later();
  }

  #along(e) {
    if (!(this.viewport.armed || e.ctrlKey) || !sideways(e)) return;
    e.preventDefault();
    const [from, to] = this.viewport.shown;
    const shift = ((e.shiftKey && !e.deltaX ? e.deltaY : e.deltaX) / (this.layout.right - this.layout.left)) * (to - from);
    this.viewport.show([from + shift, to + shift]);
  }

  #typed(e) {
    const act = {
      ...this.viewport.keys(), Escape: () => this.#choose(null),
      ArrowDown: () => this.#step(1), ArrowUp: () => this.#step(-1),
    }[e.key];
    if (e.ctrlKey || e.metaKey || e.altKey) return;
    if (!act && !this.lenses.key(e.key)) return;
    e.preventDefault();
    e.stopPropagation(); // JupyterLab must not take the arrows for itself
    act?.();
  }

  // In the search field: Enter goes from match to match, Escape back to the picture.
  #sought(e) {
    e.stopPropagation();
    if (e.key === "Escape") {
      if (this.lenses.active) this.lenses.toggle(this.lenses.active);
      this.canvas.focus({ preventScroll: true });
    } else if (e.key === "Enter" && e.target === this.lenses.input) this.#step(e.shiftKey ? -1 : 1);
  }

  // From operation to operation, in the order of their starts.
  #step(by) {
    const order = this.store.ordered();
    if (!order.length) return;
    const at = this.chosen?.i === undefined ? (by > 0 ? -1 : order.length) : order.indexOf(this.chosen.i);
    let next = clamp(at + by, 0, order.length - 1);
    const { light } = this.lenses; // only what is bright, except around the chosen one
    if (light && this.lenses.active !== "cone") {
      while (order[next] !== undefined && !light.bars.has(order[next])) next += by;
      if (order[next] === undefined) return;
    }
    const bar = this.store.bar(order[next]);
    this.viewport.seek(bar.start);
    this.#draw();
    const [x, y, , height] = this.layout.box(bar.i);
    const box = this.canvas.getBoundingClientRect();
    this.#choose(bar, box.left + Math.max(x, this.layout.left) + 8, box.top + y + height);
  }

  #choose(item, x, y) {
    this.chosen = item;
    this.spoken.textContent = item ? sentence(item, this.store) : "";
    this.#tell(item, x, y);
    if (this.lenses.active === "cone" && item) this.lenses.refresh();
    this.#later();
  }

  #tell(item, x, y) {
    const { tip } = this;
    if (!item) return tip.hidePopover();
    const color = this.#color(item.rank ?? item.src);
    tip.replaceChildren(...card(item, this.store, color).filter(Boolean));
    beside(tip, x, y);
  }

  dispose() {
    this.gone = true;
    this.stop.abort();
    this.resized.disconnect();
    this.model.off("change", this.changed);
    this.root.remove();
  }
}
