// Curves over time or steps, and who agrees with whom.

import { readable } from "./colors.js";
import { dot, h, s } from "./dom.js";
import { d3 } from "./vendor/d3.js";

// lines: {points: [[x, y]], y null: a gap; dots: points that are marked; color, and attributes};
// xs, ys: first and last; xTicks, yTicks(scale): [place, words]; at: a place that is marked;
// told(x): what the pointer there is told.
export function chart(lines, options) {
  const { kind = "", label, width, height, margin, at = null, onpick, told } = options;
  const { xs, ys, xTicks, yTicks } = options;
  const x = d3.scaleLinear(xs, [margin.left, width - margin.right]);
  const y = d3.scaleLinear(ys, [height - margin.bottom, margin.top]);
  const path = d3.line().defined(([, v]) => v !== null).x(([n]) => x(n)).y(([, v]) => y(v));
  const about = { class: `dkv-chart ${kind}`, role: "img", "aria-label": label };
  const root = s("svg", { ...about, width, height },
    ...yTicks(y).flatMap(([tick, words]) => [
      s("path", { class: "dkv-gridline", d: `M${margin.left} ${y(tick)}H${width - margin.right}` }),
      s("text", { x: margin.left - 6, y: y(tick) + 3.5, "text-anchor": "end" }, words)]),
    ...xTicks(x).map(([tick, words]) =>
      s("text", { x: x(tick), y: height - 4, "text-anchor": "middle" }, words)),
    ...lines.flatMap(({ points, dots, color, ...look }) => [
      s("path", { class: "dkv-curve", d: path(points) ?? "", stroke: color, ...look }),
      ...dots.map(([n, v]) => s("circle", { cx: x(n), cy: y(v), r: 2.75, fill: color }))]),
    at === null ? "" : s("path", { class: "dkv-cursor",
      d: `M${x(Math.max(at, xs[0]))} ${margin.top - 4}V${height - margin.bottom}` }));
  const under = (e) => x.invert(d3.pointer(e, root)[0]);
  if (onpick) root.addEventListener("click", (e) => onpick(under(e)));
  if (told) {
    const title = s("title", {}, label);
    root.prepend(title);
    root.addEventListener("pointermove", (e) => { title.textContent = told(under(e)); });
  }
  return root;
}

// Cosines of all pairs of ranks, as a triangle mirrored into a square; rough: they are estimated.
export function matrix(ranks, cosines, { look, color, rough }) {
  const n = ranks.length;
  const at = (i, j) => (i === j ? 1 : cosines[pair(Math.min(i, j), Math.max(i, j), n)]);
  const head = (r) => h("span", { class: "dkv-of", title: r.name }, dot(color(r.lane)), r.rank);
  const told = (c) => (c === null ? "–" : cosine(c, rough));
  const cell = (r, i, other, j) => {
    const c = i === j ? null : at(i, j);
    const paint = look.heat(c ?? 0);
    return h("span", { class: i === j ? "dkv-cos dkv-self" : "dkv-cos",
      title: i === j ? null : `${r.name} and ${other.name}: ${told(c)}`,
      style: `background:${paint};color:${readable(paint)}` },
    i === j || (n > 5 && c !== null) ? "" : told(c));
  };
  const words = ranks.flatMap((r, i) => ranks.slice(i + 1)
    .map((other, k) => `${r.name} and ${other.name} ${told(at(i, i + 1 + k))}`));
  const columns = `grid-template-columns: 28px repeat(${n}, minmax(8px, 52px))`;
  return h("div", { class: "dkv-matrix", role: "img",
    "aria-label": `cosine similarity: ${words.join(", ")}`,
    style: `${columns}; --high: ${n > 5 ? 15 : 20}px` },
  h("span"), ranks.map(head),
  ranks.map((r, i) => [head(r), ranks.map((other, j) => cell(r, i, other, j))]));
}

export function cosine(c, rough = false) {
  const digits = rough ? 1 : 2;
  const written = Math.abs(c) < 0.5 / 10 ** digits ? "0" : c.toFixed(digits).replace("-", "−");
  return rough ? `≈${written}` : written;
}

// The place of a pair among all pairs i < j, in order.
const pair = (i, j, n) => i * n - (i * (i + 1)) / 2 + j - i - 1;
