// Gradients per layer and rank, before and after the all-reduce; what training does over its steps.

import { chart, cosine, matrix } from "./charts.js";
import { dot, h, muted } from "./dom.js";
import { figure, grouped, oddities } from "./numbers.js";
import { Series } from "./sheet.js";
import { bounds, heat, histogram, key, LENGTH, range, told, verdict } from "./values.js";
import { d3 } from "./vendor/d3.js";

const CALLED = { sum: "average", mean: "average", own: "after", other: "after", "": "after" };
const NOTES = {
  sum: (n) => `the sum of all ${n}, divided by ${n}`, mean: (n) => `the mean of all ${n}`,
  own: () => "nothing was averaged", other: () => "neither the sum nor the mean",
  "": () => "not averaged yet",
};

const NORM = `a gradient's norm: ${LENGTH}`;
const AGREEMENT = "the mean cosine of all pairs of ranks' gradients, each pair weighted by its " +
  "norms; of all values, by the norms of the gradients and of their sum. 1: the same direction, " +
  "0: unrelated, below 0: opposed";
const DRIFT = "the largest distance of a rank's weights from those of the first rank: the root " +
  "of the sum of the squared differences. Replicas that see the same gradients stay equal";
const MARGIN = { top: 5, right: 8, bottom: 19, left: 36 };

const code = (words) => h("span", { class: "dk-code" }, words);
const hint = () => ["no training loop was watched: put it into ",
  code("with dk.watch_gradients(model) as watch:"), " and call ", code("watch.step()"),
  " after each step"];

export class Gradients extends Series {
  constructor(model, el) {
    super(model, el, "gradients", "Gradients of a training loop. Arrow left and right go from " +
      "step to step, up and down from layer to layer.");
  }

  build() {
    this.root.tabIndex = 0; // a click anywhere, and the arrow keys are the view's
    this.on(this.root, "click", (e) => {
      if (!e.target.closest("input, .dk-tools")) this.root.focus({ preventScroll: true });
    });
    this.steps = new Map(this.picture.steps.map((step) => [step.n, step]));
    this.layer = 0;
    this.slides("step");
    this.where = h("strong", { class: "dkv-where" });
    this.some = muted();
    this.row = h("div", { class: "dkv-sliding dkv-steps" }, this.arrows, this.where,
      h("div", { class: "dkv-track" }, this.slider), this.some);
    this.verdicts = h("ul", { class: "dkv-verdicts" });
    for (const name of ["tiles", "table", "detail", "empty"])
      this[name] = h("div", { class: `dkv-${name}` });
    this.body.append(this.verdicts, this.tiles, this.row, this.table, this.detail, this.empty);
  }

  merge({ steps, ...frame }) {
    for (const step of steps) this.steps.set(step.n, step);
    const kept = new Set(frame.kept);
    for (const n of this.steps.keys()) if (!kept.has(n)) this.steps.delete(n);
    this.picture = { ...this.picture, ...frame };
  }

  // -- where we are -------------------------------------------------------------------

  get list() {
    return [...this.steps.values()].sort((a, b) => a.n - b.n);
  }

  nameOf(step) {
    return step.n;
  }

  passed(step) {
    return step.n >= this.chosen;
  }

  pick(n) {
    const { list } = this;
    const near = d3.min(list, (step) => Math.abs(step.n - n));
    this.go(list.findIndex((step) => Math.abs(step.n - n) === near));
  }

  turn(to) {
    this.layer = Math.max(0, Math.min(to, this.picture.layers.length - 1));
    this.say();
  }

  keys() {
    return { ...super.keys(), ArrowUp: () => this.turn(this.layer - 1),
      ArrowDown: () => this.turn(this.layer + 1) };
  }

  sentence(step) {
    const cell = step.layers[this.layer];
    if (!cell) return "";
    const { ranks, layers } = this.picture;
    const norm = (name, s) => s && `${name} norm ${figure(s.norm)}`;
    return [`step ${step.n}, layer ${layers[this.layer].name}`,
      ...ranks.map((r, i) => norm(r.name, cell.before[i])),
      norm(CALLED[cell.kind], cell.after[0])].filter(Boolean).join("; ");
  }

  // -- drawing --------------------------------------------------------------------------

  draw() {
    const { picture, list, at } = this;
    const step = list[at];
    const told = picture.curves.loss.some((line) => line.points.length) || list.length;
    const nothing = () => (picture.live ? ["waiting for the first step"] : hint());
    this.empty.replaceChildren(...(told ? [] : nothing()));
    this.row.hidden = list.length < 2;
    this.table.hidden = this.detail.hidden = !step;
    this.tiles.hidden = !told;
    this.verdicts.replaceChildren(...picture.verdicts.map((one) => verdict(one)));
    if (!told) return;
    this.#tiles(step?.n ?? null);
    if (!step) return;
    this.slide();
    this.where.textContent = `step ${step.n}`;
    this.some.textContent = list.length < picture.total
      ? `values of ${list.length} of ${grouped(picture.total)} steps` : "";
    this.#table(step);
    this.#detail(step);
  }

  #last() {
    const lines = Object.values(this.picture.curves).flat();
    return d3.max(lines.flatMap((line) => line.points ?? []), ([n]) => n) ?? 1;
  }

  // Each rank's line in its colour; thicker what is of all.
  #curves(lines) {
    const drawn = lines.filter((line) => line.points.some(([, y]) => y !== null));
    return drawn.map(({ rank, points }) => {
      const r = this.picture.ranks.find((one) => one.rank === rank);
      return {
        name: r?.name ?? (lines.length > 1 ? "mean" : ""),
        points,
        dots: points.length === 1 ? points : [],
        color: r ? this.color(r.lane) : this.look.fg,
        "stroke-width": r ? 1.2 : 2,
        "stroke-opacity": r && lines.length > 2 ? 0.8 : 1,
      };
    });
  }

  #tiles(n) {
    const { curves, layers } = this.picture;
    const at = n ?? Infinity;
    const drift = d3.max(curves.drift, (line) => value(line, at)) ?? null;
    const varies = new Set(curves.lr[0].points.map(([, lr]) => lr)).size > 1; // else it is a fact
    const rate = value(curves.rate[0], at) ?? curves.rate[0]?.points[0]?.[1];
    const tiles = [
      ["loss", figure(value(curves.loss.at(-1), at)), "mean, each rank", curves.loss],
      ["replica drift", drift === 0 ? "0" : figure(drift),
        drift === 0 ? "bitwise equal" : "largest", curves.drift, DRIFT],
      ["norm", "", `${layers[this.layer]?.name}, each rank`, curves.norms[this.layer] ?? [],
        NORM],
      ["samples/s", rate >= 1000 ? grouped(Math.round(rate)) : figure(rate), "", curves.rate,
        "the examples that all ranks together used in a second"],
      ["learning rate", figure(value(curves.lr[0], at)), "", varies ? curves.lr : []],
    ].map(([title, number, note, lines, why = null]) => ({ title, number, note, why,
      lines: this.#curves(lines) })).filter(({ lines }) => lines.length);
    const [across, width] = this.columns(tiles.length, 140, 20);
    this.tiles.style.gridTemplateColumns = `repeat(${across}, minmax(0, 1fr))`;
    this.tiles.replaceChildren(...tiles.map(({ title, number, note, why, lines }) =>
      h("section", { class: "dkv-figure" },
        h("h4", {}, h("span", { class: why && "dkv-why", title: why }, title),
          h("b", { class: "dkv-big" }, number), h("small", { title: note }, note)),
        this.#chart(lines, width, n, title, number))));
  }

  #chart(lines, width, at, title, number) {
    const points = lines.flatMap((line) => line.points);
    const [low, high] = d3.extent(points.map(([, y]) => y).filter((y) => y !== null));
    const first = d3.min(points, ([n]) => n);
    const [from, to] = [Math.min(0, low), Math.max(0, high)];
    const compact = (v) => (Math.abs(v) >= 1000 ? `${figure(v / 1000)}k` : figure(v));
    const told = (n) => `${title} at step ${Math.round(n)}: ${lines.map((line) =>
      `${line.name} ${figure(value(line, Math.round(n)))}`.trim()).join(", ")}`;
    return chart(lines, { width, height: 60, margin: MARGIN, label: `${title}: ${number}`, at, told,
      xs: [first, Math.max(first + 1, this.#last())],
      ys: from === to ? [from, to + 1] : [from, to + 0.05 * (to - from)],
      xTicks: (x) => x.ticks(4).filter(Number.isInteger).map((n) => [n, n]),
      yTicks: (y) => (low === high ? [low] : y.ticks(2)).map((v) => [v, compact(v)]),
      onpick: (n) => this.pick(Math.round(n)) });
  }

  // One row per layer: a strip for each rank's own gradient, and for what they became.
  #table(step) {
    const { layers, ranks } = this.picture;
    const all = step.layers.some((cell) => cell.alone);
    const columns = ranks.length + 1 + (all ? 1 : 0);
    const name = Math.min(190, this.body.clientWidth * 0.2);
    const width = Math.max(20, (this.body.clientWidth - name - 90) / columns - 64);
    const kinds = new Set(step.layers.map((cell) => CALLED[cell.kind]));
    const heads = ["layer", ...ranks.map((r) => [dot(this.color(r.lane)), r.name]),
      kinds.size === 1 ? [...kinds][0] : "after", all ? "one process" : "",
      h("span", { class: "dkv-why", title: AGREEMENT }, "agreement")];
    const head = heads.filter(Boolean).map((words) => h("th", { scope: "col" }, words));
    const rows = layers.map((layer, i) => this.#layer(layer, step.layers[i], i, width, all));
    this.table.replaceChildren(
      h("table", {}, h("thead", {}, h("tr", {}, head)), h("tbody", {}, rows)));
  }

  #layer(layer, cell, i, width, all) {
    const chosen = i === this.layer;
    const one = (s) => h("td", {}, s ? [this.#strip(s, cell.most, width),
      h("span", { class: "dkv-norm", title: NORM }, figure(s.norm))] : muted("–"));
    const name = h("button", { type: "button", "aria-pressed": String(chosen) }, layer.name,
      h("small", {}, layer.shape.join(" × ")));
    const after = cell.same || !cell.after.length ? one(cell.after[0])
      : h("td", { class: "dk-alarm" }, "≠ by rank");
    return h("tr", { class: chosen ? "dkv-chosen" : null, onclick: () => this.turn(i) },
      h("th", { scope: "row" }, name), cell.before.map(one), after, all ? one(cell.alone) : "",
      h("td", { class: "dkv-agree" }, cell.agreement === null ? "–" : cosine(cell.agreement)));
  }

  #strip(s, most, width) {
    const row = { ...s, columns: Math.max(1, s.values.length) };
    return this.#heat(row, { most, width, high: 16 });
  }

  // Its title is the value under the pointer.
  #heat(s, options) {
    const canvas = heat(s, { look: this.look, digits: false, ...options });
    const rows = Math.ceil(s.values.length / s.columns);
    canvas.title = told(s);
    canvas.addEventListener("pointermove", ({ offsetX, offsetY }) => {
      const row = Math.floor(rows * offsetY / canvas.clientHeight);
      const column = Math.floor(s.columns * offsetX / canvas.clientWidth);
      const v = s.values[row * s.columns + column];
      canvas.title = v === undefined ? told(s) : `${figure(v)}, of ${told(s)}`;
    });
    return canvas;
  }

  // The chosen layer, in full.
  #detail(step) {
    const { ranks, layers } = this.picture;
    const cell = step.layers[this.layer];
    const name = `${layers[this.layer].name}  ${layers[this.layer].shape.join(" × ")}`;
    const apart = cell.same || cell.after.length < 2 ? [] : cell.after;
    const span = range([...cell.before, ...cell.after, cell.alone].map((s) => s?.values ?? []));
    const cards = ranks.map((r, i) =>
      [r.name, this.color(r.lane), cell.before[i], apart[i] ?? null, r.rank]);
    if (!apart.length) cards.push([CALLED[cell.kind], this.look.fg, cell.after[0], null, "after"]);
    if (cell.alone) cards.push(["one process", this.look.muted, cell.alone, null, "alone"]);
    const some = cell.cosines.some((c) => c !== null);
    const beside = some && this.body.clientWidth > 700 ? 264 : 0;
    const [across, wide] = this.columns(cards.length, 120, 10, this.body.clientWidth - beside);
    const size = [Math.min(250, wide) - 22, across < cards.length ? 46 : 84];
    const estimated = this.#estimated(cell);
    const grid = `grid-template-columns:repeat(${across},minmax(0,250px))`;
    const pair = `grid-template-columns:minmax(0,1fr)${beside ? ` ${beside - 20}px` : ""}`;
    this.detail.replaceChildren(
      h("div", { class: "dkv-what" }, h("strong", {}, name),
        muted(`${CALLED[cell.kind]}: ${NOTES[cell.kind](ranks.length)}`),
        muted(estimated && `drawn ${estimated}`),
        cell.apart === null ? "" : muted(`one process: up to ${figure(cell.apart)} off`)),
      h("div", { class: "dkv-pair", style: pair },
        h("div", {},
          h("div", { class: "dkv-cards", style: grid },
            cards.map((card) => this.#card(card, cell, span, size))),
          cell.most ? key(cell.most, this.look) : ""),
        some ? this.#matrix(cell, estimated) : ""));
  }

  #matrix(cell, estimated) {
    const { agreement } = cell;
    const same = this.picture.whole ? " and of the matrix" : ""; // it is calibrated so
    const rough = estimated && (agreement === null || cell.cosines.length > 1); // a pair is fixed
    const words = agreement === null
      ? `${estimated && `Estimated ${estimated}. `}Agreement needs the norm of the sum: ` +
        "nothing was summed."
      : rough ? `Estimated ${estimated}; agreement, ${cosine(agreement)}, is the mean ` +
        `over all values${same}.` : "Agreement is their mean, weighted by the norms.";
    const paint = { look: this.look, color: (lane) => this.color(lane), rough };
    return h("section", { class: "dkv-figure" },
      h("h4", {}, "cosine of each pair of ranks' gradients"),
      matrix(this.picture.ranks, cell.cosines, paint),
      h("p", { class: "dkv-muted" }, "1: the same direction, 0: unrelated. ", words));
  }

  #estimated(cell) {
    const s = cell.before.find(Boolean);
    return !s || s.values.length === s.size ? ""
      : `from ${s.values.length} of ${grouped(s.size)} values`;
  }

  // The values as a heat map, with their histogram and figures beside it.
  #card([name, color, s, after, id], cell, span, [width, high]) {
    const style = `--dk-own:${color}`;
    if (!s) return h("section", { class: "dkv-card", style }, h("h4", {}, name),
      h("p", { class: "dkv-muted" }, "not recorded"));
    const average = cell.same ? cell.after[0] : after;
    const series = [{ values: s.values, color, fill: true }];
    if (average && average !== s && cell.kind !== "own")
      series.unshift({ values: average.values, color: this.look.fg, fill: false });
    const side = Math.min(width * 0.55, high);
    const label = `histogram of ${name}, from ${span.map(figure).join(" to ")}`;
    return h("section", { class: "dkv-card", "data-card": id, style, title: told(s),
      "aria-label": `${name}: ${told(s)}` },
    h("h4", {}, name),
    h("div", { class: "dkv-one" },
      this.#heat(s, { most: cell.most, width: side, high }),
      h("div", {}, histogram(series, span, { width: width - side - 8, height: 34, label }),
        high > 60 ? h("div", { title: NORM }, muted("norm "), figure(s.norm)) : "", // in the table
        width > 125 ? h("div", { class: "dkv-muted" }, bounds(s)) : "",
        oddities(s) ? h("div", { class: "dk-alarm" }, oddities(s)) : "")));
  }
}

// The value at a step, or the one before it.
function value(line, at) {
  const found = line?.points.filter(([n, y]) => n <= at && y !== null).at(-1);
  return found ? found[1] : null;
}
