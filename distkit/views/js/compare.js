// Several traces on one clock, side by side or overlaid, and their differences in numbers.

import { legend } from "./around.js";
import { criticalPath } from "./causes.js";
import { card, losses, lossKey, meters, sentence, swatch, table } from "./comparecharts.js";
import { Clock, Order, Panel, shared } from "./comparepanels.js";
import { h, still } from "./dom.js";
import { Gestures } from "./gestures.js";
import { lookOf } from "./look.js";
import { clamp, humanSeconds, plural } from "./numbers.js";
import { Store } from "./store.js";
import { Sheet } from "./tensorsparts.js";

const KEYS = "Arrow left and right pan, plus and minus zoom, 0 shows all, arrow up and down go from operation to " +
  "operation, Escape lets go; o overlays the traces, n gives them one length, b goes to the next baseline, c shows the critical paths.";
const PILLS = [
  ["overlaid", "o", "Overlaid", "all traces in one picture, a thin row for each"],
  ["normalised", "n", "Same length", "each trace stretched to its own duration"],
  ["critical", "c", "Critical paths", "the chain of operations that made each run last so long"],
];

export class Compare extends Sheet {
  constructor(model, el) {
    super(model, el, "compare", "Several traces on one clock, and their differences");
  }

  build() {
    const { pictures, clock, baseline } = this.picture;
    this.stores = pictures.map((picture) => new Store(picture));
    this.shows = { overlaid: false, normalised: clock === "duration", critical: false };
    Object.assign(this, { baseline, zoomed: null, chosen: null, hovered: null, pointer: null, orders: [], paths: [], stale: 0 });
    this.root.setAttribute("role", "group");
    this.pills = Object.fromEntries(PILLS.map(([name, key, label, title]) => {
      const button = h("button", { type: "button", "aria-pressed": "false", title: `${title} (${key})` }, label);
      button.addEventListener("click", () => this.toggle(name));
      return [name, button];
    }));
    const tool = (label, sign, act) => {
      const b = h("button", { type: "button", "aria-label": label, title: label }, sign);
      b.addEventListener("click", act);
      return b;
    };
    this.tools.append(h("div", { class: "dk-tools" }, tool("zoom in", "+", () => this.zoom(0.5)),
      tool("zoom out", "−", () => this.zoom(2)), tool("show all", "⤢", () => this.show(this.clock.all))));
    this.kinds = h("ul", { class: "dk-legend" });
    this.frames = h("div", { class: "dkc-frames" });
    this.figures = h("div", { class: "dkc-figures" });
    this.tip = h("div", { class: "dk-tip dkc-tip", popover: "manual", role: "tooltip" });
    this.body.append(h("div", { class: "dk-lenses" }, Object.values(this.pills), this.kinds), this.frames, this.figures, this.tip);
    this.arrange();
  }

  merge({ run, picture, told }) {
    if (picture) this.stores[run].merge(picture);
    if (told) this.picture = { ...this.picture, ...told };
    this.stale += 1;
  }

  get clock() {
    return new Clock(this.stores, this.shows.normalised ? "duration" : "start");
  }

  get view() {
    return this.zoomed ?? this.clock.all;
  }

  order(n) {
    if (this.orders[n]?.version !== this.stores[n].version) this.orders[n] = new Order(this.stores[n]);
    return this.orders[n];
  }

  // -- panels ---------------------------------------------------------------------------

  toggle(name) {
    this.shows[name] = !this.shows[name];
    if (name === "normalised") this.zoomed = null;
    if (name !== "critical") this.arrange(true);
    this.later();
  }

  base(n) {
    this.baseline = (n + this.stores.length) % this.stores.length;
    this.spoken.textContent = `compared to ${this.picture.runs[this.baseline].name}`;
    this.stale += 1;
    this.later();
  }

  // Makes the panels anew; the one with the focus keeps it.
  arrange(again = false) {
    const focused = this.panels?.some((panel) => panel.canvas === document.activeElement);
    const { runs } = this.picture;
    const names = runs.map((run) => run.name);
    this.choose(null);
    this.stale += 1;
    this.panels = this.shows.overlaid ? [new Panel(names.map((_, n) => n), `${names.join(" and ")}, overlaid. ${KEYS}`)]
      : names.map((name, n) => new Panel([n], `Space-time diagram of ${name}. ${KEYS}`));
    this.titles = runs.map(() => h("div", { class: "dkc-title" }));
    const each = (panel, i) => (this.shows.overlaid ? [h("div", { class: "dkc-titles" }, this.titles), panel.stage] : [this.titles[i], panel.stage]);
    this.frames.replaceChildren(...this.panels.flatMap(each));
    for (const panel of this.panels) this.listen(panel);
    if (again && focused) this.panels[0].canvas.focus({ preventScroll: true });
  }

  listen(panel) {
    const { canvas } = panel;
    const on = (type, act, options) => canvas.addEventListener(type, act, options);
    panel.gestures = new Gestures(canvas, (e) => this.#takes(e), (view) => {
      this.tell(null);
      this.show(view);
    });
    on("pointermove", (e) => this.#moved(panel, e));
    on("pointerdown", (e) => { if (!e.button) this.drag = { x: e.clientX, far: false }; });
    on("pointerup", (e) => this.#released(panel, e));
    on("pointerleave", () => this.#left());
    on("dblclick", () => this.show(this.clock.all));
    on("keydown", (e) => this.#typed(panel, e));
    on("blur", () => this.choose(null));
  }

  // -- time -----------------------------------------------------------------------------

  show([from, to]) {
    const [first, last] = this.clock.all;
    const span = clamp(to - from, 1e-7, last - first);
    const start = clamp(from, first, last - span);
    this.zoomed = span > 0.999 * (last - first) ? null : [start, start + span];
    this.later();
  }

  glide(target) {
    const [from, begin] = [this.view, performance.now()];
    if (still()) return this.show(target);
    const step = (time) => {
      const t = clamp((time - begin) / 180, 0, 1);
      const eased = 1 - (1 - t) ** 3;
      this.show([0, 1].map((i) => from[i] + eased * (target[i] - from[i])));
      if (t < 1 && !this.gone) requestAnimationFrame(step);
    };
    requestAnimationFrame(step);
  }

  zoom(factor) {
    const [from, to] = this.view;
    const [center, half] = [(from + to) / 2, ((to - from) / 2) * factor];
    this.glide([center - half, center + half]);
  }

  pan(part) {
    const [from, to] = this.view;
    this.glide([from + part * (to - from), to + part * (to - from)]);
  }

  // -- drawing ----------------------------------------------------------------------------

  draw() {
    const { theme, stores } = this;
    this.paint = lookOf(this.root, this.scratch, theme);
    const key = [this.stale, this.paint.fg, this.root.clientWidth, this.baseline, this.shows.critical].join();
    if (key !== this.told) this.#words();
    this.told = key;
    for (const [name, button] of Object.entries(this.pills)) button.setAttribute("aria-pressed", String(this.shows[name]));
    Object.assign(this.root.dataset, { layout: this.shows.overlaid ? "overlaid" : "side", clock: this.clock.kind });
    const scene = this.#scene();
    for (const panel of this.panels) {
      if (!panel.stage.clientWidth) continue;
      panel.draw(scene);
      panel.gestures.follow(panel.at, this.view, this.clock.all);
    }
    if (stores.some((store) => store.frame.live)) this.root.dataset.live = "";
    else delete this.root.dataset.live;
  }

  // What all panels have in common.
  #scene() {
    const { stores, theme, paint: look, clock, view, zoomed, pointer } = this;
    const { overlaid } = this.shows;
    const rows = overlaid ? shared(stores) : null;
    const names = { ranks: this.names, traces: this.picture.runs.map((run) => (run.name.length > 14 ? `${run.name.slice(0, 13)}…` : run.name)) };
    const wide = (words, font) => {
      this.scratch.font = font;
      return Math.max(0, ...words.map((word) => this.scratch.measureText(word).width));
    };
    const left = clamp(wide([...this.names.values()], `600 13px ${look.font}`) + 38 +
      (overlaid ? wide(names.traces, `11px ${look.font}`) + 12 : 0), 84, 250);
    const sizes = { ...theme.sizes, height: stores.length > 2 ? 190 : 270, pitch: 68, max_gap: 44 };
    const ranks = new Map([...this.names.keys()].map((rank, i) => [rank, i]));
    return { stores, clock, view, zoomed, pointer, look, rows, names, left, sizes, ranks, lights: stores.map((_, n) => this.#light(n)), focus: this.#focus(),
      color: (lane) => this.color(lane), trace: (n) => this.trace(n) };
  }

  // The critical path of a trace, if they are wanted.
  #light(n) {
    const { version, count } = this.stores[n];
    if (!this.shows.critical || !count) return null;
    if (this.paths[n]?.version !== version) this.paths[n] = { version, ...criticalPath(this.stores[n]) };
    return this.paths[n];
  }

  #path(n) {
    const { store } = this.order(n);
    const talk = [...this.#light(n)?.bars ?? []].filter((i) => store.looks[store.look[i]].kind !== "mark");
    return `${plural(talk.length, "communication")} on the critical path`;
  }

  // The ranks of all traces, sorted, and what they are called.
  get names() {
    const found = new Map(this.stores.flatMap((store) => store.frame.lanes.map((lane) => [lane.rank, lane.name])).reverse());
    return new Map([...found].sort(([a], [b]) => a - b));
  }

  trace(n) {
    const { traces } = this.look;
    return traces[n % traces.length];
  }

  #words() {
    const { picture, stores } = this;
    const trace = (n) => this.trace(n);
    const kinds = new Set(stores.flatMap((store) => [...store.kinds()]));
    this.kinds.replaceChildren(...legend({ kinds: () => kinds }));
    picture.runs.forEach((run, n) => {
      const { frame } = stores[n];
      this.titles[n].replaceChildren(swatch(trace(n)), h("strong", {}, run.name),
        h("span", { class: "dk-facts" }, [...run.facts, frame.end > frame.start ? humanSeconds(frame.end - frame.start) : ""].filter(Boolean).join(" · ")),
        frame.live ? h("span", { class: "dk-live" }, "live") : "",
        this.shows.critical ? h("span", { class: "dkc-path" }, this.#path(n)) : "");
    });
    const told = picture.runs.some((run) => run.loss);
    const width = this.body.clientWidth;
    const half = width > 700 ? (width - 28) / 2 : width;
    const chart = (by, title) => h("section", {}, h("h4", {}, title, by ? lossKey(picture, trace) : ""), losses(picture, by, half, trace));
    const focused = this.figures.contains(document.activeElement) ? document.activeElement.dataset.trace : null;
    this.figures.replaceChildren(told ? h("div", { class: "dkc-losses" }, chart(1, "loss over time"), chart(0, "loss over steps")) : "",
      h("div", { class: "dkc-numbers" }, table(picture, this.baseline, trace, (n) => this.base(n)),
        this.names.size ? meters(picture, this.names, (lane) => this.color(lane), trace) : ""));
    if (focused !== null) this.figures.querySelector(`button[data-trace="${focused}"]`)?.focus({ preventScroll: true });
  }

  // -- the reader ---------------------------------------------------------------------------

  // What is pointed at or chosen, in each trace: its bar, or that of its counterpart.
  #focus() {
    const item = this.chosen ?? this.hovered;
    return item ? this.#all(item) : this.stores.map(() => null);
  }

  #all([n, item]) {
    if (item.i === undefined) return this.stores.map((_, k) => (k === n ? item : null));
    const mine = this.order(n);
    return this.stores.map((store, k) => {
      const i = k === n ? item.i : mine.counterpart(this.order(k), item.i);
      return i < 0 ? null : store.bar(i);
    });
  }

  #at(panel, e) {
    const box = panel.canvas.getBoundingClientRect();
    return [e.clientX - box.left, e.clientY - box.top];
  }

  #moved(panel, e) {
    this.armed ||= e.movementX !== 0 || e.movementY !== 0;
    const { at } = panel;
    if (!at) return;
    const [x, y] = this.#at(panel, e);
    this.pointer = this.clock.from(panel.numbers[0], at.time(clamp(x, at.left, at.right)));
    if (this.drag) {
      this.drag.far ||= Math.abs(e.clientX - this.drag.x) > 4;
      if (this.drag.far) this.tell(null);
    } else {
      this.hovered = panel.hit(x, y);
      panel.canvas.style.cursor = this.hovered ? "pointer" : "grab";
      if (!this.chosen) this.tell(this.hovered, e.clientX, e.clientY);
    }
    this.later();
  }

  #released(panel, e) {
    const click = this.drag && !this.drag.far;
    this.drag = null;
    if (click && panel.at) this.choose(panel.hit(...this.#at(panel, e)), e.clientX, e.clientY);
  }

  #left() {
    Object.assign(this, { pointer: null, hovered: null, armed: false });
    if (!this.chosen) this.tell(null);
    this.later();
  }

  // A wheel that merely scrolls the page past the picture does not zoom it.
  #takes(e) {
    if (e.type !== "wheel") return !e.button;
    const out = e.deltaY > 0 && !this.zoomed;
    return (this.armed || e.ctrlKey || e.metaKey) && (!out || e.ctrlKey);
  }

  #typed(panel, e) {
    const act = {
      ArrowLeft: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2), "+": () => this.zoom(0.5), "=": () => this.zoom(0.5),
      "-": () => this.zoom(2), 0: () => this.glide(this.clock.all), Home: () => this.glide(this.clock.all),
      Escape: () => this.choose(null), ArrowDown: () => this.step(panel, 1), ArrowUp: () => this.step(panel, -1),
      b: () => this.base(this.baseline + 1), ...Object.fromEntries(PILLS.map(([name, key]) => [key, () => this.toggle(name)])),
    }[e.key];
    if (!act || e.ctrlKey || e.metaKey || e.altKey) return;
    e.preventDefault();
    e.stopPropagation(); // JupyterLab must not take the arrows for itself
    act();
  }

  // From operation to operation of a trace, in the order of their starts.
  step(panel, by) {
    const n = this.chosen?.[0] ?? panel.numbers[0];
    const order = this.order(n).byTime();
    if (!order.length) return;
    const at = this.chosen?.[1].i === undefined ? (by > 0 ? -1 : order.length) : order.indexOf(this.chosen[1].i);
    const bar = this.stores[n].bar(order[clamp(at + by, 0, order.length - 1)]);
    const [from, to] = this.view;
    const u = this.clock.from(n, bar.start);
    if (u < from || u > to) this.show([u - (to - from) / 2, u + (to - from) / 2]);
    const box = panel.canvas.getBoundingClientRect();
    const [x, y, , height] = panel.layouts.get(n).box(bar.i);
    this.choose([n, bar], box.left + clamp(x, panel.at.left, panel.at.right) + 8, box.top + y + height);
  }

  choose(item, x, y) {
    this.chosen = item;
    this.tell(item, x, y);
    const bar = item?.[1].i === undefined ? null : item;
    this.spoken.textContent = bar ? sentence(this.#all(bar), bar[0], this.order(bar[0]).place[bar[1].i], this.stores, this.picture.runs.map((run) => run.name)) : "";
    this.later();
  }

  tell(item, x, y) {
    const { tip, stores } = this;
    if (!item) return tip.matches(":popover-open") ? tip.hidePopover() : null;
    const [n, thing] = [item[0], item[1].i === undefined ? item[1].send ?? item[1].recv : item[1]];
    const lane = [...this.names.keys()].indexOf(thing.rank);
    tip.replaceChildren(...card(this.#all([n, thing]), n, this.order(n).place[thing.i], stores,
      this.picture.runs.map((run) => run.name), this.color(lane), (k) => this.trace(k)));
    if (!tip.matches(":popover-open")) tip.showPopover();
    const { width, height } = tip.getBoundingClientRect();
    const below = y + 18 + height < innerHeight || y < height + 18;
    tip.style.left = `${clamp(x + 14, 8, innerWidth - width - 8)}px`;
    tip.style.top = `${below ? y + 18 : y - height - 12}px`;
  }
}
