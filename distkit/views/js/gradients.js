// Gradients per layer and rank, before and after the all-reduce; what training does over its steps.

import { h } from "./dom.js";
import { clamp } from "./numbers.js";
import { chart, cosine, matrix, value } from "./gradientscharts.js";
import { bounds, figure, heat, histogram, key, oddities, range, Sheet, spoken } from "./tensorsparts.js";
import { d3 } from "./vendor/d3.js";

const CALLED = { sum: "average", mean: "average", own: "after", other: "after", "": "after" };
const NOTES = { sum: (n) => `the sum of all ${n}, divided by ${n}`, mean: (n) => `the mean of all ${n}`,
  own: () => "nothing was averaged", other: () => "neither the sum nor the mean", "": () => "not averaged yet" };

const LENGTH = "a gradient's norm: the root of the sum of its squared values, its length as a vector";
const AGREEMENT = "the mean cosine of all pairs of ranks' gradients, each pair weighted by its norms; of all " +
  "values, by the norms of the gradients and of their sum. 1: the same direction, 0: unrelated, below 0: opposed";
const DRIFT = "the largest distance of a rank's weights from those of the first rank: the root of the sum of " +
  "the squared differences. Replicas that see the same gradients stay equal";

const HINT = () => ["no training loop was watched: put it into ", h("span", { class: "dk-code" }, "with dk.watch_gradients(model) as watch:"),
  " and call ", h("span", { class: "dk-code" }, "watch.step()"), " after each step"];

export class Gradients extends Sheet {
  constructor(model, el) {
    super(model, el, "gradients", "Gradients of a training loop. Arrow left and right go from step to step, " +
      "up and down from layer to layer.");
  }

  build() {
    this.steps = new Map(this.picture.steps.map((step) => [step.n, step]));
    [this.chosen, this.layer, this.follow] = [null, 0, this.picture.live];
    const button = (label, sign, by) => {
      const b = h("button", { type: "button", "aria-label": label, title: label }, sign);
      b.addEventListener("click", () => this.step(by));
      return b;
    };
    this.slider = h("input", { type: "range", class: "dkv-slider", min: 0, step: 1, "aria-label": "step" });
    this.where = h("strong", { class: "dkv-where" });
    this.row = h("div", { class: "dkv-sliding dkv-steps" }, h("div", { class: "dk-tools" },
      button("previous step", "◀", -1), button("next step", "▶", 1)), this.where, h("div", { class: "dkv-track" }, this.slider),
    this.some = h("span", { class: "dkv-muted" }));
    for (const name of ["verdicts", "tiles", "table", "detail", "empty"])
      this[name] = h(name === "verdicts" ? "ul" : "div", { class: `dkv-${name}` });
    this.body.append(this.verdicts, this.tiles, this.row, this.table, this.detail, this.empty);
    this.slider.addEventListener("input", () => this.go(Number(this.slider.value)));
    this.root.addEventListener("keydown", (e) => this.typed(e));
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

  get at() {
    const { list } = this;
    if (this.chosen === null) return this.follow ? list.length - 1 : 0;
    return clamp(d3.bisector((step) => step.n).left(list, this.chosen), 0, list.length - 1);
  }

  go(position) {
    const { list } = this;
    const at = clamp(position, 0, list.length - 1);
    this.follow = this.picture.live && at === list.length - 1;
    this.chosen = this.follow ? null : list[at]?.n ?? null;
    this.spoken.textContent = this.sentence(list[at]);
    this.later();
  }

  pick(n) {
    const { list } = this;
    const near = d3.min(list, (step) => Math.abs(step.n - n));
    this.go(list.findIndex((step) => Math.abs(step.n - n) === near));
  }

  step(by) {
    this.go(this.at + by);
  }

  turn(by) {
    this.layer = clamp(this.layer + by, 0, this.picture.layers.length - 1);
    this.spoken.textContent = this.sentence(this.list[this.at]);
    this.later();
  }

  typed(e) {
    const act = { ArrowLeft: () => this.step(-1), ArrowRight: () => this.step(1), ArrowUp: () => this.turn(-1),
      ArrowDown: () => this.turn(1), Home: () => this.go(0), End: () => this.go(this.list.length - 1) }[e.key];
    if (!act || !this.steps.size || e.ctrlKey || e.metaKey || e.altKey) return;
    e.preventDefault();
    e.stopPropagation(); // JupyterLab must not take the arrows for itself
    act();
  }

  sentence(step) {
    const cell = step?.layers[this.layer];
    if (!cell) return "";
    const norms = this.picture.ranks.map((r, i) => cell.before[i] && `${r.name} norm ${figure(cell.before[i].norm)}`);
    const after = cell.after[0] ? `${CALLED[cell.kind]} norm ${figure(cell.after[0].norm)}` : "";
    return [`step ${step.n}, layer ${this.picture.layers[this.layer].name}`, ...norms, after].filter(Boolean).join("; ");
  }

  // -- drawing --------------------------------------------------------------------------

  draw() {
    const { picture, list, at } = this;
    const step = list[at];
    const told = picture.curves.loss.some((line) => line.points.length) || list.length;
    this.empty.replaceChildren(...(told ? [] : picture.live ? ["waiting for the first step"] : HINT()));
    this.row.hidden = list.length < 2;
    this.table.hidden = this.detail.hidden = !step;
    this.tiles.hidden = !told;
    this.verdicts.replaceChildren(...picture.verdicts.map(verdict));
    if (!told) return;
    this.#tiles(step?.n ?? null);
    if (!step) return;
    this.slider.max = list.length - 1;
    this.slider.value = at;
    this.slider.setAttribute("aria-valuetext", this.sentence(step));
    this.where.textContent = `step ${step.n}`;
    this.some.textContent = list.length < picture.total ? `values of ${list.length} of ${picture.total.toLocaleString("en")} steps` : "";
    this.#table(step);
    this.#detail(step);
  }

  #last() {
    const { curves } = this.picture;
    return d3.max(Object.values(curves).flat().flatMap((line) => line.points ?? []), ([n]) => n) ?? 1;
  }

  #curves(lines) {
    const { ranks } = this.picture;
    const found = lines.map((line) => {
      const r = ranks.find((rank) => rank.rank === line.rank);
      return r ? { ...line, color: this.color(r.lane), width: 1.2, opacity: lines.length > 2 ? 0.8 : 1 }
        : { ...line, color: this.look.fg, width: 2 };
    });
    return found.filter((line) => line.points.some(([, y]) => y !== null));
  }

  #tiles(n) {
    const { curves } = this.picture;
    const at = n ?? Infinity;
    const drift = d3.max(curves.drift, (line) => value(line, at)) ?? null;
    const norms = curves.norms[this.layer] ?? [];
    const tiles = [
      ["loss", figure(value(curves.loss.at(-1), at)), "mean, and each rank", curves.loss],
      ["replica drift", drift === 0 ? "0" : figure(drift), drift === 0 ? "equal to the bit" : "largest, from rank 0", curves.drift, DRIFT],
      ["norm", "", `${this.picture.layers[this.layer]?.name}, each rank`, norms, LENGTH],
      ["samples/s", whole(value(curves.rate[0], at) ?? curves.rate[0]?.points[0]?.[1]), "all ranks", curves.rate],
      ["learning rate", figure(value(curves.lr[0], at)), "", curves.lr],
    ].filter(([, , , lines]) => this.#curves(lines).length);
    const across = Math.max(1, Math.min(tiles.length, Math.floor((this.body.clientWidth + 20) / 160)));
    const width = (this.body.clientWidth - 20 * (across - 1)) / across;
    this.tiles.style.gridTemplateColumns = `repeat(${across}, minmax(0, 1fr))`;
    this.tiles.replaceChildren(...tiles.map(([title, number, note, lines, why = null]) => h("section", { class: "dkv-figure" },
      h("h4", {}, h("span", { class: why && "dkv-why", title: why }, title), h("b", { class: "dkv-big" }, number), h("small", {}, note)),
      chart(this.#curves(lines), { width, at: n, last: this.#last(), label: `${title}: ${number}`, onpick: (x) => this.pick(x) }))));
  }

  // One row per layer: a strip for each rank's own gradient, and for what they became.
  #table(step) {
    const { layers, ranks } = this.picture;
    const all = step.layers.some((cell) => cell.alone);
    const columns = ranks.length + 1 + (all ? 1 : 0);
    const name = Math.min(190, this.body.clientWidth * 0.2);
    const width = Math.max(20, (this.body.clientWidth - name - 90) / columns - 64);
    const kinds = new Set(step.layers.map((cell) => CALLED[cell.kind]));
    const title = kinds.size === 1 ? [...kinds][0] : "after";
    const head = h("tr", {}, h("th", { scope: "col" }, "layer"),
      ranks.map((r) => h("th", { scope: "col" }, h("span", { class: "dk-dot", style: `background:${this.color(r.lane)}` }), r.name)),
      h("th", { scope: "col" }, title), all ? h("th", { scope: "col" }, "one process") : "",
      h("th", { scope: "col" }, h("span", { class: "dkv-why", title: AGREEMENT }, "agreement")));
    const rows = layers.map((layer, i) => this.#layer(layer, step.layers[i], i, width, all));
    this.table.replaceChildren(h("table", {}, h("thead", {}, head), h("tbody", {}, rows)));
  }

  #layer(layer, cell, i, width, all) {
    const chosen = i === this.layer;
    const one = (s, word = "–") => h("td", {}, s ? [this.#strip(s, cell.most, width), h("span", { class: "dkv-norm", title: LENGTH }, figure(s.norm))]
      : h("span", { class: "dkv-muted" }, word));
    const button = h("button", { type: "button", "aria-pressed": String(chosen) }, layer.name, h("small", {}, layer.shape.join(" × ")));
    const row = h("tr", { class: chosen ? "dkv-chosen" : null }, h("th", { scope: "row" }, button),
      cell.before.map((s) => one(s)), cell.same || !cell.after.length ? one(cell.after[0]) : h("td", { class: "dk-alarm" }, "≠ by rank"),
      all ? one(cell.alone) : "", h("td", { class: "dkv-agree" }, cell.agreement === null ? "–" : cosine(cell.agreement)));
    row.addEventListener("click", () => { this.layer = i; this.later(); });
    return row;
  }

  #strip(s, most, width) {
    return heat({ ...s, columns: Math.max(1, s.values.length) }, { look: this.look, most, width, high: 16, digits: false, fill: true });
  }

  // The chosen layer, in full.
  #detail(step) {
    const { ranks, layers } = this.picture;
    const cell = step.layers[this.layer];
    const name = `${layers[this.layer].name}  ${layers[this.layer].shape.join(" × ")}`;
    const apart = cell.same || cell.after.length < 2 ? [] : cell.after;
    const span = range([...cell.before, ...cell.after, cell.alone].map((s) => s?.values ?? []));
    const cards = ranks.map((r, i) => [r.name, this.color(r.lane), cell.before[i], apart[i] ?? null, r.rank]);
    if (!apart.length) cards.push([CALLED[cell.kind], this.look.fg, cell.after[0], null, "after"]);
    if (cell.alone) cards.push(["one process", this.look.muted, cell.alone, null, "alone"]);
    const some = cell.cosines.some((c) => c !== null);
    const beside = some && this.body.clientWidth > 700 ? 250 : 0;
    const full = this.body.clientWidth - beside;
    const across = Math.max(1, Math.min(cards.length, Math.floor((full + 10) / 130)));
    const width = Math.min(250, (full - 10 * (across - 1)) / across) - 22;
    const high = across < cards.length ? 60 : 84;
    const grid = h("div", { class: "dkv-cards", style: `grid-template-columns:repeat(${across},minmax(0,250px))` },
      cards.map((card) => this.#card(card, cell, span, width, high)));
    const estimated = this.#estimated(cell);
    this.detail.replaceChildren(h("div", { class: "dkv-what" }, h("strong", {}, name),
      h("span", { class: "dkv-muted" }, `${CALLED[cell.kind]}: ${NOTES[cell.kind](ranks.length)}`),
      h("span", { class: "dkv-muted" }, estimated && `drawn ${estimated}, at equal strides`),
      cell.apart === null ? "" : h("span", { class: "dkv-muted" }, `one process: largest difference ${figure(cell.apart)}`),
      cell.most ? key(cell.most, this.look) : ""),
    h("div", { class: "dkv-pair", style: `grid-template-columns:minmax(0,1fr)${beside ? ` ${beside - 20}px` : ""}` }, grid,
      some ? h("section", { class: "dkv-figure" }, h("h4", {}, "cosine of each two ranks' gradients"),
        matrix(ranks, cell.cosines, { look: this.look, color: (lane) => this.color(lane) }),
        h("p", { class: "dkv-muted" }, "1: the same direction, 0: unrelated. ", estimated && cell.agreement !== null
          ? `Estimated ${estimated}; agreement, ${cosine(cell.agreement)}, is the mean over all values.`
          : "Agreement is their mean, weighted by the norms.")) : ""));
  }

  #estimated(cell) {
    const s = cell.before.find(Boolean);
    return !s || s.values.length === s.size ? "" : `from ${s.values.length} of ${s.size.toLocaleString("en")} values`;
  }

  // The values as a heat map, with their histogram and figures beside it.
  #card([name, color, s, after, id], cell, span, width, high) {
    if (!s) return h("section", { class: "dkv-card", style: `--dk-own:${color}` }, h("h4", {}, name), h("p", { class: "dkv-muted" }, "not looked at"));
    const average = cell.same ? cell.after[0] : after;
    const series = [{ values: s.values, color, fill: true }];
    if (average && average !== s && cell.kind !== "own") series.unshift({ values: average.values, color: this.look.fg, fill: false });
    const side = Math.min(width * 0.55, high);
    return h("section", { class: "dkv-card", "data-card": id, style: `--dk-own:${color}`, title: spoken(s), "aria-label": `${name}: ${spoken(s)}` },
      h("h4", {}, name), h("div", { class: "dkv-one" }, heat(s, { look: this.look, most: cell.most, width: side, high, digits: false }),
        h("div", {}, histogram(series, span, { width: width - side - 8, height: 34, label: `histogram of ${name}, from ${span.map(figure).join(" to ")}` }),
          h("div", { title: LENGTH }, h("span", { class: "dkv-muted" }, "norm "), figure(s.norm)),
          width > 125 ? h("div", { class: "dkv-muted" }, bounds(s)) : "", oddities(s) ? h("div", { class: "dk-alarm" }, oddities(s)) : "")));
  }
}

const whole = (x) => (x >= 1000 ? Math.round(x).toLocaleString("en") : figure(x));

function verdict({ word, text }) {
  return h("li", { class: word === "same" ? "dkv-same" : "dkv-wrong" },
    h("b", { "aria-hidden": "true" }, word === "same" ? "=" : "≠"), h("span", {}, text));
}
