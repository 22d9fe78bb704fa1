// What pictures of values share: a page that follows its model, heat maps, histograms, numbers.

import { fit } from "./canvas.js";
import { h } from "./dom.js";
import { clamp, short } from "./numbers.js";
import { onTheme } from "./repaint.js";
import { d3 } from "./vendor/d3.js";

const WORDS = { nan: "NaN", inf: "∞", "-inf": "−∞" };
export const figure = (v) => v === null || v === undefined ? "–" : WORDS[v] ??
  (v === 0 || (Math.abs(v) < 1e6 && Math.abs(v) >= 1e-4) ? short(v) : v.toExponential(1)).replaceAll("-", "−");
export const finite = (values) => values.filter(Number.isFinite);

// -- a page that follows its model ------------------------------------------------------

export class Sheet {
  // merge: takes what changed into the picture; the subclass has draw().
  constructor(model, el, name, aria) {
    const picture = model.get("picture");
    Object.assign(this, { model, picture, theme: picture.theme, next: picture.next ?? 0 });
    this.head = h("div", { class: "dk-head" });
    this.tools = h("div", { class: "dkv-values-tools" });
    this.notices = h("ul", { class: "dk-notices" });
    this.body = h("div", { class: "dkv-body" });
    this.spoken = h("p", { class: "dk-spoken", "aria-live": "polite" });
    this.root = h("figure", { class: `distkit-timeline distkit-values distkit-${name}`, "aria-label": aria },
      h("header", {}, this.head, this.tools), this.notices, this.body, this.spoken);
    el.append(this.root);
    this.build();
    this.stop = new AbortController();
    for (const type of ["transitionrun", "transitionend"])
      this.on(this.root, type, (e) => { if (e.target === this.root) this.later(); });
    onTheme(() => this.later(), this.stop.signal);
    this.resized = new ResizeObserver(() => this.later());
    this.resized.observe(this.root);
    this.changed = () => this.drain();
    model.on("change", this.changed);
    this.drain();
    this.later();
  }

  on(target, type, act) {
    target.addEventListener(type, act, { signal: this.stop.signal });
  }

  // Patches lie on the model under a number each, so that none is lost before we look.
  drain() {
    let patch;
    while ((patch = this.model.get(`patch${this.next}`))) {
      this.merge(patch);
      this.next += 1;
      this.later();
    }
  }

  later() {
    if (this.pending || this.gone) return;
    this.pending = requestAnimationFrame(() => {
      this.pending = null;
      if (!this.root.clientWidth) return; // not on the page yet, or hidden
      this.#relook();
      this.#words();
      this.draw();
      this.root.dataset.drawn = String((Number(this.root.dataset.drawn) || 0) + 1);
    });
  }

  #words() {
    const { title, facts, live, notices } = this.picture;
    this.head.replaceChildren(h("strong", {}, title || this.constructor.name),
      h("span", { class: "dk-facts" }, facts.join(" · ")), live ? h("span", { class: "dk-live" }, "live") : "");
    this.notices.replaceChildren(...notices.map((words) => h("li", {}, words)));
  }

  // Colours and fonts as the page has them now; a canvas wants them resolved.
  #relook() {
    const css = getComputedStyle(this.root);
    const context = (this.scratch ??= h("canvas").getContext("2d"));
    const resolve = (name) => {
      context.fillStyle = css.getPropertyValue(name).trim();
      return context.fillStyle;
    };
    const [fg, bg, muted] = ["--dk-fg", "--dk-bg", "--dk-muted"].map(resolve);
    const [r, g, b] = [1, 3, 5].map((i) => parseInt(bg.slice(i, i + 2), 16));
    const dark = 0.299 * r + 0.587 * g + 0.114 * b < 128;
    this.look = { fg, bg, muted, dark, font: css.fontFamily, ...this.theme[dark ? "dark" : "light"] };
    const paper = d3.interpolateRgb(bg, fg)(dark ? 0.07 : 0.035);
    this.look.heat = heatColors(paper, dark);
    this.root.style.setProperty("--dk-warning", this.look.warning);
    this.root.style.setProperty("--dk-rank", this.look.ranks[0]);
    this.root.style.setProperty("--dk-cell", paper);
  }

  color(lane) {
    return this.look.ranks[lane % this.look.ranks.length];
  }

  dispose() {
    this.gone = true;
    this.stop.abort();
    this.resized.disconnect();
    this.model.off("change", this.changed);
    this.root.remove();
  }
}

// Zero is paper, positive orange, negative blue; t from -1 to 1.
function heatColors(paper, dark) {
  const [negative, positive] = dark ? ["#4aa3ff", "#ffb02e"] : ["#0072b2", "#e08200"];
  const scale = d3.scaleDiverging([-1, 0, 1], (t) => t < 0.5
    ? d3.interpolateRgb(negative, paper)(2 * t) : d3.interpolateRgb(paper, positive)(2 * t - 1));
  return scale.clamp(true);
}

// -- heat maps ------------------------------------------------------------------------------

const LOW = 20; // a single row is at least so high

// Draws a summary's values; most: the magnitude painted in full; marked: cells with a frame.
export function heat(summary, { look, most, width, high = Infinity, marked = [], color = null, digits = true }) {
  const canvas = h("canvas", { class: "dkv-heat", role: "img", "aria-label": spoken(summary) });
  const { values, columns } = summary;
  const rows = Math.max(1, Math.ceil(values.length / Math.max(1, columns)));
  const side = Math.min(width / Math.max(1, columns), 46);
  const tall = Math.min(rows === 1 ? Math.max(side, LOW) : Math.max(side, 7), high / rows, 46);
  const size = [side * Math.max(1, columns), tall * rows];
  const c = fit(canvas, ...size);
  canvas.style.width = `${size[0]}px`;
  c.fillStyle = look.heat(0);
  c.fillRect(0, 0, ...size);
  const gap = side > 9 && tall > 9 ? 1 : 0;
  values.forEach((v, i) => {
    const [x, y] = [(i % columns) * side, Math.floor(i / columns) * tall];
    const box = [x + gap / 2, y + gap / 2, side - gap, tall - gap];
    if (Number.isFinite(v)) {
      c.fillStyle = look.heat(most ? v / most : 0);
      c.fillRect(...box);
    } else odd(c, box, v, look);
    if (digits && side > 27 && tall > 13) write(c, box, v, most, look);
  });
  c.lineWidth = 1.6;
  c.strokeStyle = color ?? look.fg;
  for (const i of marked) {
    const [x, y] = [(i % columns) * side, Math.floor(i / columns) * tall];
    c.strokeRect(x + 1, y + 1, side - 2, tall - 2);
  }
  return canvas;
}

function odd(c, [x, y, w, tall], v, look) {
  c.save();
  c.beginPath();
  c.rect(x, y, w, tall);
  c.clip();
  c.strokeStyle = c.fillStyle = v === "nan" ? look.warning : look.fg;
  c.globalAlpha = 0.18;
  c.fillRect(x, y, w, tall);
  c.globalAlpha = 1;
  c.lineWidth = 1;
  for (let at = x - tall; at < x + w; at += 4) {
    c.beginPath();
    c.moveTo(at, y + tall);
    c.lineTo(at + tall, y);
    c.stroke();
  }
  c.restore();
}

function write(c, [x, y, w, tall], v, most, look) {
  const words = figure(v);
  c.font = `600 ${Math.min(12, 1.75 * w / Math.max(3, words.length))}px ${look.font}`;
  [c.textAlign, c.textBaseline] = ["center", "middle"];
  const strong = Number.isFinite(v) && most && Math.abs(v) / most > 0.62;
  c.fillStyle = strong ? (look.dark || v > 0 ? "#17202a" : "#fff") : look.fg;
  if (!Number.isFinite(v)) {
    c.lineWidth = 3;
    c.strokeStyle = look.bg;
    c.strokeText(words, x + w / 2, y + tall / 2);
  }
  c.fillText(words, x + w / 2, y + tall / 2 + 0.5);
}

// From where to where the values go; those that are numbers.
export function bounds(s) {
  const [low, high] = Number.isFinite(s.min) ? [s.min, s.max] : d3.extent(finite(s.values));
  return low === undefined ? "no numbers" : `${figure(low)} to ${figure(high)}`;
}

export function spoken(s) {
  const range = `${s.size.toLocaleString("en")} values, ${bounds(s)}, norm ${figure(s.norm)}`;
  const words = oddities(s);
  return words ? `${range}, ${words}` : range;
}

// How many values are no numbers.
export function oddities(s) {
  const found = Object.entries(WORDS).map(([key, word]) => [s.values.filter((v) => v === key).length, word]);
  return found.filter(([n]) => n).map(([n, word]) => `${n} × ${word}`).join(", ");
}

// The colours and what they mean.
export function key(most, look) {
  const stops = d3.ticks(-1, 1, 8).map((t) => look.heat(t)).join(",");
  return h("div", { class: "dkv-scale" }, h("span", {}, figure(-most)),
    h("i", { style: `background:linear-gradient(90deg,${stops})` }), h("span", {}, figure(most)));
}

// -- histograms --------------------------------------------------------------------------------

const BINS = 17;

// One curve of steps per series {values, color, fill}; all on the same axis [low, high].
export function histogram(series, [low, high], { width, height, label, most = null }) {
  const svg = d3.select(document.createElementNS("http://www.w3.org/2000/svg", "svg"))
    .attr("class", "dkv-histogram").attr("viewBox", `0 0 ${width} ${height}`)
    .attr("width", width).attr("height", height).attr("role", "img").attr("aria-label", label);
  const heights = series.map(({ values }) => counts(values, low, high));
  const x = d3.scaleLinear([0, BINS], [0.5, width - 0.5]);
  const y = d3.scaleLinear([0, Math.max(1, most ?? d3.max(heights.flat()))], [height - 1, 3]);
  const outline = d3.area().x(([i]) => x(i)).y0(height - 1).y1(([, n]) => y(n));
  series.forEach(({ color, fill }, i) => {
    const points = heights[i].flatMap((n, k) => [[k, n], [k + 1, n]]);
    svg.append("path").attr("d", outline(points)).attr("fill", fill ? color : "none")
      .attr("fill-opacity", 0.28).attr("stroke", color).attr("stroke-width", fill ? 1.4 : 1.1)
      .attr("stroke-dasharray", fill ? null : "3 2.5");
  });
  svg.append("path").attr("class", "dkv-base").attr("d", `M0 ${height - 0.5}H${width}`);
  if (low < 0 && high > 0) {
    const zero = x(clamp(BINS * -low / (high - low), 0, BINS));
    svg.append("path").attr("class", "dkv-zero").attr("d", `M${zero} 0V${height}`);
  }
  return svg.node();
}

export function counts(values, low, high) {
  const edges = Array.from({ length: BINS - 1 }, (_, i) => low + (high - low) * (i + 1) / BINS);
  if (!(high > low)) return Array.from({ length: BINS }, (_, i) => (i === BINS >> 1 ? finite(values).length : 0));
  return d3.bin().domain([low, high]).thresholds(edges)(finite(values)).map((bin) => bin.length);
}

export function axis([low, high]) {
  return h("div", { class: "dkv-ends" }, h("span", {}, figure(Number(low.toPrecision(3)))),
    h("span", {}, figure(Number(high.toPrecision(3)))));
}

// The range of all values; at least something wide.
export function range(lists) {
  const [low, high] = d3.extent(finite(lists.flat()));
  if (low === undefined) return [-1, 1];
  return low === high ? [low - 0.5, high + 0.5] : [low, high];
}
