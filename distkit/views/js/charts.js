// Curves over time or steps.

import { s } from "./dom.js";
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
