// Several traces on one clock, side by side or overlaid, and their differences in numbers.

import { legend } from "./around.js";
import { card, losses, lossKey, meters, sentence, swatch, table } from "./comparecharts.js";
import { Clock, Order, Panel, shared } from "./comparepanels.js";
import { keys } from "./comparestrips.js";
import { h, press, toggles } from "./dom.js";
import { listen, Viewport } from "./gestures.js";
import { clamp, humanSeconds, plural } from "./numbers.js";
import { Sheet } from "./sheet.js";
import { Store } from "./store.js";
import { beside } from "./tooltip.js";

const KEYS = "Arrow left and right pan, plus and minus zoom, 0 shows all, arrow up and down go " +
  "from operation to operation, Escape clears the selection; o puts the traces side by side, " +
  "n stretches them to the same length, " +
  "b selects the next baseline, c shows the critical paths.";
const PILLS = [
  ["apart", "o", "Side by side", "a picture of each trace, with its messages"],
  ["normalised", "n", "Same length", "each trace stretched to its own duration"],
  ["critical", "c", "Critical paths",
    "the chain of operations that determined each run's duration"],
];

// Beside the figures all panels are so high together, else each; a title takes so much [pixels].
const [ROOM, APART, TITLE] = [412, 230, 30];
const SMALL = { row: 15, mark: 11, gap: 2, pad: 3, min_gap: 5, max_gap: 44, max_rows: 70 };
// Up to so many traces have the figures beside them, where it is so wide [pixels].
const [MOST_BESIDE, BESIDE, WIDE, NARROW] = [3, 740, 980, 560];

// What a trace's lanes need [pixels].
const sum = (numbers) => numbers.reduce((all, one) => all + one, 0);
const need = ({ frame: { lanes } }) => sum(lanes.map(({ rows, marks }) => 2 * SMALL.pad +
  SMALL.min_gap + rows * (SMALL.row + SMALL.gap) + marks * (SMALL.mark + SMALL.gap))) || APART / 2;

export class Compare extends Sheet {
  constructor(model, el) {
    super(model, el, "compare", "Several traces on a common time axis, and their differences");
  }

  build() {
    const { pictures, clock, baseline } = this.picture;
    this.stores = pictures.map((picture) => new Store(picture));
    this.shows = { apart: false, normalised: clock === "duration", critical: false };
    const all = () => this.clock.all;
    const reset = () => this.viewport.glide(all());
    this.viewport = new Viewport(this, { all, rest: all, reset });
    Object.assign(this, { baseline, orders: [], stale: 0 });
    [this.chosen, this.hovered, this.pointer] = [null, null, null];
    this.root.setAttribute("role", "group");
    this.pills = toggles(PILLS, (name) => this.toggle(name));
    this.tools.append(h("div", { class: "dk-lenses" }, Object.values(this.pills)));
    this.tools.append(this.viewport.tools());
    this.kinds = h("ul", { class: "dk-legend" });
    this.hint = h("li");
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
    this.conclude();
    this.stale += 1;
  }

  // What is said of the others: compared with the baseline that the reader has chosen. Not private:
  // the constructor of the base class comes here, before private names are there.
  conclude() {
    const { said, baseline } = this.picture;
    const turned = (words) => (words === said[baseline] ? said[this.baseline] : words);
    const [notices, notes] = [this.picture.notices, this.picture.notes].map((all) =>
      all.map(turned));
    this.picture = { ...this.picture, baseline: this.baseline, notices, notes };
  }

  get clock() {
    return new Clock(this.stores, this.shows.normalised ? "duration" : "start");
  }

  order(n) {
    const store = this.stores[n];
    if (this.orders[n]?.version !== store.version) this.orders[n] = new Order(store);
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
    this.conclude();
    const { runs, said } = this.picture;
    const words = [`compared to ${runs[this.baseline].name}`, said[this.baseline]];
    this.spoken.textContent = words.filter(Boolean).join(": ");
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
    const overlaid = !this.shows.apart;
    this.panels = overlaid
      ? [new Panel(names.map((_, n) => n), `${names.join(" and ")}, overlaid. ${KEYS}`)]
      : names.map((name, n) => new Panel([n], `Space-time diagram of ${name}. ${KEYS}`));
    this.titles = runs.map(() => h("div", { class: "dkc-title" }));
    const titles = overlaid ? [h("div", { class: "dkc-titles" }, this.titles)] : this.titles;
    this.frames.replaceChildren(...this.panels.flatMap((panel, i) => [titles[i], panel.stage]));
    for (const panel of this.panels) {
      panel.gestures = listen(this, panel.canvas, {
        hit: (x, y) => panel.hit(x, y), scale: () => panel.at, typed: (e) => this.#typed(panel, e),
        moved: (x) => {
          const time = panel.at.time(clamp(x, panel.at.left, panel.at.right));
          this.pointer = this.clock.from(panel.numbers[0], time);
        },
      });
    }
    if (again && focused) this.panels[0].canvas.focus({ preventScroll: true });
  }

  // -- drawing ----------------------------------------------------------------------------

  draw() {
    const { stores, shows } = this;
    const { clientWidth } = this.root;
    const key = [this.stale, this.look.fg, clientWidth, this.baseline, shows.critical].join();
    if (key !== this.told) this.#words();
    this.told = key;
    press(this.pills, (name) => shows[name]);
    const width = this.body.clientWidth;
    this.beside = stores.length <= MOST_BESIDE && width > BESIDE;
    this.root.toggleAttribute("data-beside", this.beside);
    this.root.toggleAttribute("data-slim", this.beside && width <= WIDE);
    this.root.toggleAttribute("data-tight", this.beside || width < NARROW);
    const layout = shows.apart ? "side" : "overlaid";
    Object.assign(this.root.dataset, { layout, clock: this.clock.kind });
    const scene = this.#scene();
    for (const panel of this.panels) {
      if (!panel.stage.clientWidth) continue;
      panel.draw(scene);
      panel.gestures.follow(panel.at, this.viewport.shown, this.clock.all);
    }
    const many = this.panels.some((panel) => panel.many);
    this.hint.textContent = many ? "zoom in (+) for names" : "";
    if (stores.some((store) => store.frame.live)) this.root.dataset.live = "";
    else delete this.root.dataset.live;
  }

  // What all panels have in common.
  #scene() {
    const { stores, theme, look, clock, viewport: { shown: view, zoomed }, pointer } = this;
    const overlaid = !this.shows.apart;
    const short = (name) => (name.length > 20 ? `${name.slice(0, 19)}…` : name);
    const names = { ranks: this.names, traces: this.picture.runs.map((run) => short(run.name)) };
    const wide = (words, font) => {
      this.scratch.font = font;
      return Math.max(0, ...words.map((word) => this.scratch.measureText(word).width));
    };
    const ranks = wide([...this.names.values()], `600 13px ${look.font}`) + 38;
    const traces = overlaid ? wide(names.traces, `11px ${look.font}`) + 12 : 0;
    const titles = overlaid ? 1 : stores.length;
    const axes = clock.kind === "duration" ? titles : 1;
    const room = ROOM - axes * theme.sizes.axis - titles * TITLE;
    const needs = stores.map(need);
    const rooms = needs.map((one) =>
      (!this.beside ? APART : overlaid ? room : (room * one) / sum(needs)));
    return {
      stores, clock, view, zoomed, pointer, look, names,
      left: Math.round(clamp(ranks + traces, 84, 250)),
      rows: overlaid ? shared(stores) : null, overs: stores.map((_, n) => this.#overs(n)),
      sizes: { ...theme.sizes, ...SMALL }, rooms,
      ranks: new Map([...this.names.keys()].map((rank, i) => [rank, i])),
      lights: stores.map((_, n) => this.#light(n)), focus: this.#focus(),
      color: (lane) => this.color(lane), trace: (n) => this.trace(n),
    };
  }

  // From each rank to when it had nothing left to do but to wait for the others' end.
  #overs(n) {
    const { start } = this.stores[n].frame;
    const { ranks } = this.picture.runs[n].figures;
    return new Map(ranks.map(({ rank, over }) => [rank, over === null ? Infinity : start + over]));
  }

  // The critical path of a trace, if they are wanted.
  #light(n) {
    return this.shows.critical ? this.stores[n].causes?.critical ?? null : null;
  }

  #path(n) {
    const store = this.stores[n];
    if (!store.causes) return "its critical path is known once the run has ended";
    const { bars, ends } = store.causes.critical;
    const lanes = [...new Set([...bars, ...ends.keys()].map((i) => store.lane(i)))];
    const found = lanes.sort((a, b) => a - b).map((i) => store.frame.lanes[i]);
    const names = found.map(({ name }) => name);
    const nodes = found.some(({ role }) => role) ? "node" : "rank";
    const told = names.length > 3 ? plural(names.length, nodes)
      : [names.slice(0, -1).join(", "), ...names.slice(-1)].filter(Boolean).join(" and ");
    return `its critical path goes through ${told}`;
  }

  // The ranks of all traces, sorted, and what they are called.
  get names() {
    const lanes = this.stores.flatMap((store) => store.frame.lanes);
    const found = new Map(lanes.map((lane) => [lane.rank, lane.name]).reverse());
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
    const own = this.shows.apart ? legend({ kinds: () => kinds }) : keys(stores, kinds);
    this.kinds.replaceChildren(...own, this.hint);
    picture.runs.forEach((run, n) => {
      const { start, end, live } = stores[n].frame;
      const took = end > start ? humanSeconds(end - start) : "";
      const facts = [...(this.shows.critical ? [] : run.facts), took].filter(Boolean);
      this.titles[n].replaceChildren(swatch(trace(n)), h("strong", {}, run.name),
        h("span", { class: "dk-facts" }, facts.join(" · ")),
        live ? h("span", { class: "dk-live" }, "live") : "",
        this.shows.critical ? h("span", { class: "dkc-path" }, this.#path(n)) : "");
    });
    const told = picture.runs.some((run) => run.loss);
    const width = this.body.clientWidth;
    const half = width > 700 ? (width - 28) / 2 : width;
    const chart = (by, title) => h("section", {},
      h("h4", {}, title, by ? lossKey(picture, trace) : ""), losses(picture, by, half, trace));
    const { activeElement: focused } = document;
    const base = this.figures.contains(focused) ? focused.dataset.trace : null;
    this.losses.hidden = !told;
    if (told) this.losses.replaceChildren(chart(1, "loss over time"), chart(0, "loss over steps"));
    this.figures.replaceChildren(table(picture, this.baseline, trace, (n) => this.base(n)),
      this.names.size ? meters(picture, this.names, (lane) => this.color(lane), trace) : "");
    if (base === null) return;
    this.figures.querySelector(`button[data-trace="${base}"]`)?.focus({ preventScroll: true });
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

  #typed(panel, e) {
    const pill = PILLS.find(([, key]) => key === e.key);
    const own = { ...this.viewport.keys(), Escape: () => this.choose(null),
      ArrowDown: () => this.step(panel, 1), ArrowUp: () => this.step(panel, -1),
      b: () => this.base(this.baseline + 1) };
    return pill ? () => this.toggle(pill[0]) : own[e.key];
  }

  // From operation to operation of a trace, in the order of their starts.
  step(panel, by) {
    const [n, { i } = {}] = this.chosen ?? [panel.numbers[0]];
    const order = this.stores[n].ordered();
    if (!order.length) return;
    const at = i === undefined ? (by > 0 ? -1 : order.length) : order.indexOf(i);
    const bar = this.stores[n].bar(order[clamp(at + by, 0, order.length - 1)]);
    this.viewport.seek(this.clock.from(n, bar.start));
    const box = panel.canvas.getBoundingClientRect();
    const [x, y, , height] = panel.layouts.get(n).box(bar.i);
    const left = clamp(x, panel.at.left, panel.at.right) + 8;
    this.choose([n, bar], box.left + left, box.top + y + height);
  }

  // What is told of a bar: its counterparts, its trace, its place, the traces and their names.
  #about(n, bar) {
    const names = this.picture.runs.map((run) => run.name);
    return [this.#all([n, bar]), n, this.order(n).place[bar.i], this.stores, names];
  }

  choose(item, x, y) {
    this.chosen = item;
    this.tell(item, x, y);
    const [n, bar] = item ?? [];
    this.spoken.textContent = bar?.i === undefined ? "" : sentence(...this.#about(n, bar));
    this.later();
  }

  tell(item, x, y) {
    const { tip } = this;
    if (!item) return tip.hidePopover();
    const [n, thing] = item;
    const bar = thing.i === undefined ? thing.send ?? thing.recv : thing;
    const lane = [...this.names.keys()].indexOf(bar.rank);
    tip.replaceChildren(...card(...this.#about(n, bar), this.color(lane), (k) => this.trace(k)));
    beside(tip, this.beside ? this.figures.getBoundingClientRect().left : x, y);
  }
}
