// The timeline in the browser: puts the pieces together and answers the reader.
// An anywidget module; a stand-alone page gives it a model with the same get and on.

import { alternative, heading, legend, notices, sums } from "./around.js";
import { h, still } from "./dom.js";
import { Layout } from "./layout.js";
import { clamp, humanSeconds } from "./numbers.js";
import { alpha, brightness, Painter } from "./painter.js";
import { Store } from "./store.js";
import { card, sentence } from "./tooltip.js";

const KEYS = "Arrow left and right pan, plus and minus zoom, 0 shows all, " +
  "arrow up and down go from operation to operation, Escape lets go.";

const FRAMES = 15; // per second while a run goes on: the ranks need the processor as well
const PATIENCE = 600_000; // milliseconds without news

class Timeline {
  constructor(model, el) {
    const picture = model.get("picture");
    Object.assign(this, { model, theme: picture.theme, next: picture.next ?? 0 });
    this.store = new Store(picture);
    this.merged = performance.now();
    [this.chosen, this.hovered, this.zoomed, this.pointer] = [null, null, null, null];
    this.#build(el);
    this.#listen();
    this.#drain();
  }

  // -- what is on the page --------------------------------------------------------

  #build(el) {
    const button = (label, sign, act) => {
      const b = h("button", { type: "button", "aria-label": label, title: label }, sign);
      b.addEventListener("click", act);
      return b;
    };
    this.canvas = h("canvas", { tabindex: 0, role: "application", "aria-roledescription": "timeline" });
    this.tip = h("div", { class: "dk-tip", popover: "manual", role: "tooltip" });
    this.spoken = h("p", { class: "dk-spoken", "aria-live": "polite" });
    this.parts = Object.fromEntries(["head", "notices", "legend", "sums"].map((name) =>
      [name, h(name === "legend" || name === "notices" ? "ul" : "div", { class: `dk-${name}` })]));
    this.stage = h("div", { class: "dk-stage" }, this.canvas);
    const tools = h("div", { class: "dk-tools" },
      button("zoom in", "+", () => this.#zoom(0.5)), button("zoom out", "−", () => this.#zoom(2)),
      button("show all", "⤢", () => this.#reset()));
    this.root = h("figure", { class: "distkit-timeline" },
      h("header", {}, this.parts.head, this.parts.legend, tools),
      this.parts.notices, this.stage, this.parts.sums, this.tip, this.spoken);
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

  // Colours and fonts as the page has them now; a canvas wants them resolved.
  #relook() {
    const css = getComputedStyle(this.root);
    const resolve = (name) => {
      this.context.fillStyle = css.getPropertyValue(name).trim();
      return this.context.fillStyle;
    };
    const [fg, bg, before] = [resolve("--dk-fg"), resolve("--dk-bg"), this.look?.warning];
    const dark = brightness(bg) < 128;
    this.look = {
      fg, bg, muted: resolve("--dk-muted"), font: css.fontFamily, soft: alpha(fg, 0.75),
      lane: alpha(fg, dark ? 0.055 : 0.035), mark: alpha(fg, dark ? 0.13 : 0.09),
      grid: alpha(fg, 0.07), hairline: alpha(fg, 0.3), ...this.theme[dark ? "dark" : "light"],
    };
    if (this.look.warning === before) return;
    this.root.style.setProperty("--dk-warning", this.look.warning);
    this.root.style.setProperty("--dk-rank", this.look.ranks[0]);
    this.#words();
  }

  // -- time -------------------------------------------------------------------------

  #now() {
    const { frame } = this.store;
    if (!frame.live || frame.end === null) return frame.end ?? 0;
    return frame.end + (still() ? 0 : (performance.now() - this.merged) / 1000);
  }

  #all() {
    const { frame } = this.store;
    const [start, end] = [frame.start ?? 0, this.#now()];
    const span = Math.max(end - start, 1e-6);
    const open = !frame.live && frame.notices.some((text) => text.startsWith("still in"));
    return [start - 0.012 * span, start + (open ? 1.12 : 1.02) * span];
  }

  #view() {
    return this.zoomed ?? this.#all();
  }

  #show([from, to]) {
    const [first, last] = this.#all();
    const span = clamp(to - from, 1e-7, last - first);
    const start = clamp(from, first, last - span);
    this.zoomed = span > 0.999 * (last - first) ? null : [start, start + span];
    this.#later();
  }

  #glide(target) {
    const [from, begin] = [this.#view(), performance.now()];
    if (still()) return this.#show(target);
    const step = (time) => {
      const t = clamp((time - begin) / 180, 0, 1);
      const eased = 1 - (1 - t) ** 3;
      this.#show([0, 1].map((i) => from[i] + eased * (target[i] - from[i])));
      if (t < 1) requestAnimationFrame(step);
    };
    requestAnimationFrame(step);
  }

  #zoom(factor, around = null, smooth = true) {
    const [from, to] = this.#view();
    const center = around ?? (from + to) / 2;
    const target = [center - (center - from) * factor, center + (to - center) * factor];
    if (smooth) this.#glide(target);
    else this.#show(target);
  }

  #pan(part) {
    const [from, to] = this.#view();
    this.#glide([from + part * (to - from), to + part * (to - from)]);
  }

  #reset() {
    this.#glide(this.#all());
  }

  // -- drawing ------------------------------------------------------------------------

  #later() {
    if (this.pending || this.gone) return;
    this.pending = requestAnimationFrame(() => {
      this.pending = null;
      this.#draw();
      if (this.#grows()) setTimeout(() => this.#later(), 1000 / FRAMES);
    });
  }

  // Open bars grow by themselves, until a kernel must be supposed dead.
  #grows() {
    return this.store.frame.live && !still() && performance.now() - this.merged < PATIENCE;
  }

  #draw() {
    const width = this.stage.clientWidth;
    if (!width) return; // not on the page yet, or hidden
    this.#relook();
    const { context, canvas } = this;
    const view = this.#view();
    const end = this.store.frame.live ? this.#now() : Math.max(view[1], this.#all()[1]);
    context.font = `600 13px ${this.look.font}`;
    const measure = ({ name, detail }) =>
      Math.max(context.measureText(name).width, 0.9 * context.measureText(detail).width);
    this.layout = new Layout(this.store, this.theme.sizes, width, view, end, measure);
    const ratio = devicePixelRatio || 1;
    const size = [Math.round(width * ratio), Math.round(this.layout.height * ratio)];
    if (canvas.width !== size[0] || canvas.height !== size[1]) [canvas.width, canvas.height] = size;
    canvas.style.height = `${this.layout.height}px`;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    new Painter(context, this.layout, this.look, this.chosen ?? this.hovered).draw();
    if (this.pointer) this.#cursor();
    if (this.zoomed) this.#whereabouts();
    if (!this.store.bars.size) this.#nothing();
  }

  #cursor() {
    const { context: c, layout: at, look } = this;
    const x = clamp(this.pointer[0], at.left, at.right);
    const text = humanSeconds(at.time(x) - (this.store.frame.start ?? 0));
    c.font = `600 12px ${look.font}`;
    const width = c.measureText(text).width + 12;
    const left = clamp(x - width / 2, 0, at.width - width);
    c.fillStyle = look.hairline;
    c.fillRect(Math.round(x), 0, 1, at.bottom);
    c.fillStyle = look.bg; // no half-covered number beside it
    c.fillRect(left - 24, at.bottom + 4, width + 48, 21);
    Object.assign(c, { fillStyle: look.fg, textAlign: "left", textBaseline: "middle" });
    c.beginPath();
    c.roundRect(left, at.bottom + 5, width, 19, 4);
    c.fill();
    c.fillStyle = look.bg;
    c.fillText(text, left + 6, at.bottom + 15);
  }

  // A thin line under the axis: which part of the whole is shown.
  #whereabouts() {
    const { context: c, layout: at, look } = this;
    const [first, last] = this.#all();
    const x = (time) => at.left + ((time - first) / (last - first)) * (at.right - at.left);
    const [from, to] = this.zoomed.map(x);
    c.fillStyle = look.grid;
    c.fillRect(at.left, at.height - 4, at.right - at.left, 3);
    c.fillStyle = look.hairline;
    c.fillRect(from, at.height - 4, Math.max(6, to - from), 3);
  }

  #nothing() {
    const { context: c, layout: at, look } = this;
    const text = this.store.frame.live ? "Waiting for the first message …" : "Nothing was recorded.";
    Object.assign(c, { font: `14px ${look.font}`, fillStyle: look.muted, textAlign: "center" });
    c.fillText(text, (at.left + at.right) / 2, at.bottom / 2);
  }

  // -- the reader ------------------------------------------------------------------------

  #listen() {
    const on = (target, type, act, options) => {
      target.addEventListener(type, act, { signal: this.stop.signal, ...options });
    };
    this.stop = new AbortController();
    on(this.canvas, "pointermove", (e) => this.#moved(e));
    on(this.canvas, "pointerdown", (e) => this.#pressed(e));
    on(this.canvas, "pointerup", (e) => this.#released(e));
    on(this.canvas, "pointerleave", () => this.#left());
    on(this.canvas, "dblclick", () => this.#reset());
    on(this.canvas, "wheel", (e) => this.#wheeled(e), { passive: false });
    on(this.canvas, "keydown", (e) => this.#typed(e));
    on(this.canvas, "blur", () => this.#choose(null));
    on(window, "wheel", (e) => { if (e.target !== this.canvas) this.armed = false; }, { passive: true });
    for (const type of ["transitionrun", "transitionend", "transitioncancel"])
      on(this.root, type, () => this.#later());
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
    this.#words();
    this.#later();
  }

  #at(e) {
    const box = this.canvas.getBoundingClientRect();
    return [e.clientX - box.left, e.clientY - box.top];
  }

  #moved(e) {
    this.armed ||= e.movementX !== 0 || e.movementY !== 0;
    this.pointer = this.#at(e);
    if (this.drag) return this.#dragged(e);
    const hit = this.layout?.hit(...this.pointer) ?? null;
    this.canvas.style.cursor = hit ? "pointer" : "grab";
    if (hit !== this.hovered) this.hovered = hit;
    if (!this.chosen) this.#tell(hit, e.clientX, e.clientY);
    this.#later();
  }

  #pressed(e) {
    if (e.button !== 0) return;
    this.canvas.setPointerCapture(e.pointerId);
    this.drag = { x: e.clientX, view: this.#view(), far: false };
  }

  #dragged(e) {
    const { x, view } = this.drag;
    this.drag.far ||= Math.abs(e.clientX - x) > 4;
    if (!this.drag.far) return;
    this.canvas.style.cursor = "grabbing";
    this.#tell(null);
    const shift = ((e.clientX - x) / (this.layout.right - this.layout.left)) * (view[1] - view[0]);
    this.#show([view[0] - shift, view[1] - shift]);
  }

  #released(e) {
    const click = this.drag && !this.drag.far;
    this.drag = null;
    if (click) this.#choose(this.layout.hit(...this.#at(e)), e.clientX, e.clientY);
  }

  #left() {
    [this.pointer, this.hovered, this.armed] = [null, null, false];
    if (!this.chosen) this.#tell(null);
    this.#later();
  }

  // A wheel that merely scrolls the page past the picture does not zoom it.
  #wheeled(e) {
    const out = e.deltaY > 0 && !this.zoomed;
    if (!(this.armed || e.ctrlKey || e.metaKey) || (out && !e.ctrlKey)) return;
    e.preventDefault();
    this.#tell(null);
    const [from, to] = this.#view();
    const along = e.shiftKey ? e.deltaY : e.deltaX;
    if (Math.abs(along) > Math.abs(e.shiftKey ? 0 : e.deltaY)) {
      const shift = (along / (this.layout.right - this.layout.left)) * (to - from);
      return this.#show([from + shift, to + shift]);
    }
    const factor = Math.exp(clamp(e.deltaY * (e.deltaMode ? 20 : 1), -120, 120) * 0.0025);
    this.#zoom(factor, this.layout.time(this.#at(e)[0]), false);
  }

  #typed(e) {
    const act = {
      ArrowLeft: () => this.#pan(-0.2), ArrowRight: () => this.#pan(0.2),
      "+": () => this.#zoom(0.5), "=": () => this.#zoom(0.5), "-": () => this.#zoom(2),
      0: () => this.#reset(), Home: () => this.#reset(), Escape: () => this.#choose(null),
      ArrowDown: () => this.#step(1), ArrowUp: () => this.#step(-1),
    }[e.key];
    if (!act || e.ctrlKey || e.metaKey || e.altKey) return;
    e.preventDefault();
    e.stopPropagation(); // JupyterLab must not take the arrows for itself
    act();
  }

  // From operation to operation, in the order of their starts.
  #step(by) {
    const bars = [...this.store.bars.values()].sort((a, b) => a.start - b.start);
    if (!bars.length) return;
    const at = bars.findIndex((bar) => bar.id === this.chosen?.id);
    const bar = bars[clamp(at < 0 ? (by > 0 ? 0 : bars.length - 1) : at + by, 0, bars.length - 1)];
    const [from, to] = this.#view();
    const half = (to - from) / 2;
    if (bar.start < from || bar.start > to) this.#show([bar.start - half, bar.start + half]);
    this.#draw();
    const [x, y, , height] = this.layout.box(bar);
    const box = this.canvas.getBoundingClientRect();
    this.#choose(bar, box.left + Math.max(x, this.layout.left) + 8, box.top + y + height);
  }

  #choose(item, x, y) {
    this.chosen = item;
    this.spoken.textContent = item ? sentence(item, this.store) : "";
    this.#tell(item, x, y);
    this.#later();
  }

  #tell(item, x, y) {
    const { tip } = this;
    if (!item) return tip.hidePopover();
    const color = this.#color(item.rank ?? item.src);
    tip.replaceChildren(...card(item, this.store, color).filter(Boolean));
    if (!tip.matches(":popover-open")) tip.showPopover();
    const { width, height } = tip.getBoundingClientRect();
    const below = y + 18 + height < innerHeight || y < height + 18;
    tip.style.left = `${clamp(x + 14, 8, innerWidth - width - 8)}px`;
    tip.style.top = `${below ? y + 18 : y - height - 12}px`;
  }

  dispose() {
    this.gone = true;
    this.stop.abort();
    this.resized.disconnect();
    this.model.off("change", this.changed);
    this.root.remove();
  }
}

function render({ model, el }) {
  const timeline = new Timeline(model, el);
  return () => timeline.dispose();
}

export default { render };
