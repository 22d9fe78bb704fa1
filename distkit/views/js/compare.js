// Several traces on one clock, side by side or overlaid, and their differences in numbers.

import { legend } from "./around.js";
import { card, losses, lossKey, meters, sentence, swatch, table } from "./comparecharts.js";
import { Clock, Order, Panel, shared } from "./comparepanels.js";
import { h } from "./dom.js";
import { Gestures, Viewport } from "./gestures.js";
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

// Beside the figures all panels are so high together, else each; a title takes so much [pixels].
const [ROOM, APART, TITLE] = [480, 230, 30];
const SMALL = { row: 15, mark: 11, gap: 2, pad: 3, min_gap: 5, max_gap: 44, max_rows: 70 };
// Up to so many traces have the figures beside them, where it is so wide [pixels].
const [MOST_BESIDE, BESIDE, NARROW] = [3, 980, 560];

export class Compare extends Sheet {
  constructor(model, el) {
    super(model, el, "compare", "Several traces on one clock, and their differences");
  }

  build() {
    const { pictures, clock, baseline } = this.picture;
    this.stores = pictures.map((picture) => new Store(picture));
    this.shows = { overlaid: false, normalised: clock === "duration", critical: false };
    const all = () => this.clock.all;
    this.viewport = new Viewport({ all, rest: all, reset: () => this.viewport.glide(all()), onchange: () => this.later() });
    Object.assign(this, { baseline, chosen: null, hovered: null, pointer: null, orders: [], stale: 0 });
    this.root.setAttribute("role", "group");
    this.pills = Object.fromEntries(PILLS.map(([name, key, label, title]) => {
      const button = h("button", { type: "button", "aria-pressed": "false", title: `${title} (${key})` }, label);
      button.addEventListener("click", () => this.toggle(name));
      return [name, button];
    }));
    this.tools.append(h("div", { class: "dk-lenses" }, Object.values(this.pills)));
    this.tools.append(this.viewport.tools());
    this.kinds = h("ul", { class: "dk-legend" });
    this.frames = h("div", { class: "dkc-frames" });
    this.figures = h("div", { class: "dkc-numbers" });
    this.tip = h("div", { class: "dk-tip dkc-tip", popover: "manual", role: "tooltip" });
    this.losses = h("div", { class: "dkc-losses" });
    const left = h("div", {}, this.frames, this.kinds);
    const both = h("div", { class: "dkc-both" }, left, this.figures);
    this.body.append(both, this.losses, this.tip);
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

  order(n) {
    if (this.orders[n]?.version !== this.stores[n].version) this.orders[n] = new Order(this.stores[n]);
    return this.orders[n];
  }

  // -- panels ---------------------------------------------------------------------------

  toggle(name) {
    this.shows[name] = !this.shows[name];
    if (name === "normalised") this.viewport.zoomed = null;
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
    panel.gestures = new Gestures(canvas, (e) => this.viewport.takes(e), (view) => {
      this.tell(null);
      this.viewport.show(view);
    });
    on("pointermove", (e) => this.#moved(panel, e));
    on("pointerdown", (e) => { if (!e.button) this.drag = { x: e.clientX, far: false }; });
    on("pointerup", (e) => this.#released(panel, e));
    on("pointerleave", () => this.#left());
    on("dblclick", () => this.viewport.reset());
    on("keydown", (e) => this.#typed(panel, e));
    on("blur", () => this.choose(null));
  }

  // -- drawing ----------------------------------------------------------------------------

  draw() {
    const { theme, stores } = this;
    this.paint = lookOf(this.root, this.scratch, theme);
    const key = [this.stale, this.paint.fg, this.root.clientWidth, this.baseline, this.shows.critical].join();
    if (key !== this.told) this.#words();
    this.told = key;
    for (const [name, button] of Object.entries(this.pills)) button.setAttribute("aria-pressed", String(this.shows[name]));
    const width = this.body.clientWidth;
    this.beside = stores.length <= MOST_BESIDE && width > BESIDE;
    this.root.toggleAttribute("data-beside", this.beside);
    this.root.toggleAttribute("data-tight", this.beside || width < NARROW);
    Object.assign(this.root.dataset, { layout: this.shows.overlaid ? "overlaid" : "side", clock: this.clock.kind });
    const scene = this.#scene();
    for (const panel of this.panels) {
      if (!panel.stage.clientWidth) continue;
      panel.draw(scene);
      panel.gestures.follow(panel.at, this.viewport.shown, this.clock.all);
    }
    if (stores.some((store) => store.frame.live)) this.root.dataset.live = "";
    else delete this.root.dataset.live;
  }

  // What all panels have in common.
  #scene() {
    const { stores, theme, paint: look, clock, viewport: { shown: view, zoomed }, pointer } = this;
    const { overlaid } = this.shows;
    const rows = overlaid ? shared(stores) : null;
    const names = { ranks: this.names, traces: this.picture.runs.map((run) => (run.name.length > 14 ? `${run.name.slice(0, 13)}…` : run.name)) };
    const wide = (words, font) => {
      this.scratch.font = font;
      return Math.max(0, ...words.map((word) => this.scratch.measureText(word).width));
    };
    const left = clamp(wide([...this.names.values()], `600 13px ${look.font}`) + 38 +
      (overlaid ? wide(names.traces, `11px ${look.font}`) + 12 : 0), 84, 250);
    const panels = overlaid ? 1 : stores.length;
    const room = this.beside ? (ROOM - theme.sizes.axis) / panels - TITLE : APART;
    const sizes = { ...theme.sizes, ...SMALL, height: room, tallest: room };
    const ranks = new Map([...this.names.keys()].map((rank, i) => [rank, i]));
    return { stores, clock, view, zoomed, pointer, look, rows, names, left, sizes, ranks, lights: stores.map((_, n) => this.#light(n)), focus: this.#focus(),
      color: (lane) => this.color(lane), trace: (n) => this.trace(n) };
  }

  // The critical path of a trace, if they are wanted.
  #light(n) {
    return this.shows.critical ? this.stores[n].causes?.critical ?? null : null;
  }

  #path(n) {
    const store = this.stores[n];
    if (!store.causes) return "its critical path is known when the run has ended";
    const ranks = new Set([...store.causes.critical.bars].map((i) => store.lane(i)));
    return `its critical path goes through ${plural(ranks.size, "rank")}`;
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
    this.losses.hidden = !told;
    if (told) this.losses.replaceChildren(chart(1, "loss over time"), chart(0, "loss over steps"));
    this.figures.replaceChildren(table(picture, this.baseline, trace, (n) => this.base(n)),
      this.names.size ? meters(picture, this.names, (lane) => this.color(lane), trace) : "");
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
    this.viewport.armed ||= e.movementX !== 0 || e.movementY !== 0;
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
    Object.assign(this, { pointer: null, hovered: null });
    this.viewport.armed = false;
    if (!this.chosen) this.tell(null);
    this.later();
  }

  #typed(panel, e) {
    const act = {
      ...this.viewport.keys(),
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
    this.viewport.seek(this.clock.from(n, bar.start));
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
