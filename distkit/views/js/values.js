// Pictures of the values of tensors: heat maps, histograms, and their words.

import { fit } from "./canvas.js";
import { readable } from "./colors.js";
import { h, muted, s } from "./dom.js";
import { clamp, figure, finite, grouped, oddities } from "./numbers.js";
import { d3 } from "./vendor/d3.js";

const LOW = 20; // a single row is at least so high

// Draws a summary's values; most: the magnitude painted in full; marked: cells with a frame.
export function heat(summary, options) {
  const { look, most, width, high = Infinity, marked = [], color = null, digits = true } = options;
  const canvas = h("canvas", { class: "dkv-heat", role: "img", "aria-label": told(summary) });
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
  c.fillStyle = Number.isFinite(v) ? readable(look.heat(most ? v / most : 0)) : look.fg;
  if (!Number.isFinite(v)) {
    c.lineWidth = 3;
    c.strokeStyle = look.bg;
    c.strokeText(words, x + w / 2, y + tall / 2);
  }
  c.fillText(words, x + w / 2, y + tall / 2 + 0.5);
}

export const LENGTH = "the root of the sum of the squared values: its length as a vector";

// From where to where the values go; those that are numbers.
export function bounds(s) {
  const [low, high] = Number.isFinite(s.min) ? [s.min, s.max] : d3.extent(finite(s.values));
  return low === undefined ? "no numbers" : `${figure(low)} to ${figure(high)}`;
}

export function told(s) {
  const range = `${grouped(s.size)} values, ${bounds(s)}, norm ${figure(s.norm)}`;
  const words = oddities(s);
  return words ? `${range}, ${words}` : range;
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
export function histogram(series, [low, high], { width, height, label }) {
  const heights = series.map(({ values }) => counts(values, low, high));
  const x = d3.scaleLinear([0, BINS], [0.5, width - 0.5]);
  const y = d3.scaleLinear([0, Math.max(1, d3.max(heights.flat()))], [height - 1, 3]);
  const outline = d3.area().x(([i]) => x(i)).y0(height - 1).y1(([, n]) => y(n));
  const zero = x(clamp(BINS * -low / (high - low), 0, BINS));
  return s("svg", { class: "dkv-histogram", viewBox: `0 0 ${width} ${height}`, width, height,
    role: "img", "aria-label": label },
  ...series.map(({ color, fill }, i) => s("path", {
    d: outline(heights[i].flatMap((n, k) => [[k, n], [k + 1, n]])), stroke: color,
    fill: fill ? color : "none", "fill-opacity": 0.28,
    "stroke-width": fill ? 1.4 : 1.1, "stroke-dasharray": fill ? null : "3 2.5" })),
  s("path", { class: "dkv-base", d: `M0 ${height - 0.5}H${width}` }),
  low < 0 && high > 0 ? s("path", { class: "dkv-zero", d: `M${zero} 0V${height}` }) : "");
}

function counts(values, low, high) {
  const edges = Array.from({ length: BINS - 1 }, (_, i) => low + (high - low) * (i + 1) / BINS);
  const all = finite(values).length;
  if (!(high > low)) return Array.from({ length: BINS }, (_, i) => (i === BINS >> 1 ? all : 0));
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

// -- whether ranks agree ----------------------------------------------------------------------

export const wrong = ({ word, expected }) => word === "different" && expected;

export function verdict({ word, text, expected = true }, when = "") {
  const kind = word === "same" ? "dkv-same"
    : wrong({ word, expected }) ? "dkv-wrong" : "dk-different";
  return h("li", { class: kind }, h("b", { "aria-hidden": "true" }, word === "same" ? "=" : "≠"),
    when ? muted(when) : "", h("span", {}, text));
}
