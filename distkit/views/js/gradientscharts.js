// Curves over the steps of a training loop, and who agrees with whom.

import { h } from "./dom.js";
import { figure } from "./tensorsparts.js";
import { d3 } from "./vendor/d3.js";

const MARGIN = { top: 5, right: 8, bottom: 16, left: 36 };

// lines: {points: [[step, y]], color, width, dash}; last: steps of the loop; at: the chosen step.
export function chart(lines, { width, height = 62, last, at, label, zero = true, onpick }) {
  const svg = d3.select(document.createElementNS("http://www.w3.org/2000/svg", "svg"))
    .attr("class", "dkv-chart").attr("width", width).attr("height", height)
    .attr("role", "img").attr("aria-label", label);
  const values = lines.flatMap((line) => line.points.map(([, y]) => y)).filter((y) => y !== null);
  const [low, high] = d3.extent(values);
  const first = d3.min(lines, (line) => line.points[0]?.[0]) ?? 1;
  const x = d3.scaleLinear([first, Math.max(first + 1, last)], [MARGIN.left, width - MARGIN.right]);
  const y = d3.scaleLinear(span(low, high, zero), [height - MARGIN.bottom, MARGIN.top]);
  axes(svg, x, y, width, height, low === high ? [low ?? 0] : null);
  const path = d3.line().defined(([, v]) => v !== null).x(([n]) => x(n)).y(([, v]) => y(v));
  for (const { points, color, width: w = 1.4, dash = null, opacity = 1 } of lines) {
    if (points.length === 1 && points[0][1] !== null)
      svg.append("circle").attr("cx", x(points[0][0])).attr("cy", y(points[0][1])).attr("r", 2.5).attr("fill", color);
    svg.append("path").attr("d", path(points)).attr("class", "dkv-curve").attr("stroke", color)
      .attr("stroke-width", w).attr("stroke-dasharray", dash).attr("stroke-opacity", opacity);
  }
  if (at !== null) svg.append("path").attr("class", "dkv-cursor")
    .attr("d", `M${x(Math.max(at, first))} ${MARGIN.top - 4}V${height - MARGIN.bottom}`);
  svg.on("click", (e) => onpick(Math.round(x.invert(d3.pointer(e)[0]))));
  return svg.node();
}

function span(low, high, zero) {
  if (low === undefined) return [0, 1];
  const [from, to] = zero ? [Math.min(0, low), Math.max(0, high)] : [low, high];
  return from === to ? [from - (zero ? 0 : 1), to + 1] : [from, to + 0.05 * (to - from)];
}

function axes(svg, x, y, width, height, flat) {
  for (const tick of flat ? [flat[0]] : y.ticks(2)) {
    svg.append("path").attr("class", "dkv-gridline").attr("d", `M${MARGIN.left} ${y(tick)}H${width - MARGIN.right}`);
    svg.append("text").attr("x", MARGIN.left - 6).attr("y", y(tick) + 3.5).attr("text-anchor", "end").text(compact(tick));
  }
  for (const tick of x.ticks(4).filter(Number.isInteger))
    svg.append("text").attr("x", x(tick)).attr("y", height - 4).attr("text-anchor", "middle").text(tick);
}

const compact = (v) => (Math.abs(v) >= 1000 ? `${figure(v / 1000)}k` : figure(v));

// The value at a step, or the one before it.
export function value(line, at) {
  const found = line?.points.filter(([n, y]) => n <= at && y !== null).at(-1);
  return found ? found[1] : null;
}

// Cosines of all pairs of ranks, as a triangle mirrored into a square.
export function matrix(ranks, cosines, { look, color }) {
  const n = ranks.length;
  const at = (i, j) => (i === j ? 1 : cosines[pair(Math.min(i, j), Math.max(i, j), n)]);
  const head = (r) => h("span", { class: "dk-dot", style: `background:${color(r.lane)}`, title: r.name });
  const cells = ranks.map((r, i) => [head(r), ranks.map((other, j) => {
    const c = at(i, j);
    const strong = c !== null && Math.abs(c) > 0.62;
    const ink = strong ? (look.dark || c > 0 ? "#17202a" : "#fff") : "inherit";
    return h("span", { class: i === j ? "dkv-cos dkv-self" : "dkv-cos", title: `${r.name} and ${other.name}`,
      style: `background:${look.heat(i === j ? 0 : c ?? 0)};color:${i === j ? "inherit" : ink}` },
    i === j ? "" : c === null ? "–" : n > 5 ? "" : cosine(c));
  })]);
  const words = ranks.flatMap((r, i) => ranks.slice(i + 1).map((o, k) => `${r.name} and ${o.name} ${figure(at(i, i + 1 + k))}`));
  return h("div", { class: "dkv-matrix", role: "img", "aria-label": `cosine similarity: ${words.join(", ")}`,
    style: `grid-template-columns: 16px repeat(${n}, minmax(8px, 52px)); --high: ${n > 5 ? 15 : 20}px` },
  h("span"), ranks.map(head), cells);
}

export const cosine = (c) => (Math.abs(c) < 0.005 ? "0" : c.toFixed(2).replace("-", "−"));

// The place of a pair among all pairs i < j, in order.
const pair = (i, j, n) => i * n - (i * (i + 1)) / 2 + j - i - 1;
