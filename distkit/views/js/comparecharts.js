// The differences of several traces: a table of figures, the ranks, losses, and one operation.

import { h } from "./dom.js";
import { humanBytes, humanSeconds, plural } from "./numbers.js";
import { call } from "./painter.js";
import { figure } from "./tensorsparts.js";
import { d3 } from "./vendor/d3.js";

const MOST_RANKS = 16; // ranks beyond this number are not told one by one
export const DASHES = ["", "7 3", "2 2.5", "9 3 2 3"];
const percent = (x) => `${Math.round(100 * x)} %`;
const WRITE = { s: humanSeconds, B: humanBytes, n: (n) => n.toLocaleString("en"), "%": percent, x: figure };

export function told(value, unit) {
  if (value === null || value === undefined) return "–";
  return typeof value === "string" ? figure(value) : WRITE[unit](value);
}

// A value as a multiple of the baseline's.
export function ratio(value, base) {
  if (typeof value !== "number" || typeof base !== "number") return "";
  if (value === base) return "=";
  if (!base) return "";
  const times = value / base;
  if (times && Math.abs(times) < 0.001) return "<0.001×";
  return `${times >= 100 ? Math.round(times).toLocaleString("en") : Number(times.toPrecision(2))}×`;
}

function difference(value, base, unit) {
  if (typeof value !== "number" || typeof base !== "number") return "";
  const by = value - base;
  return `${by < 0 ? "−" : "+"}${told(Math.abs(by), unit)}`;
}

export const swatch = (color, dash) => h("i", { class: "dkc-swatch", "data-dash": dash || null, style: `background:${color}` });

// A row per figure; a click on a name makes that trace the baseline.
export function table({ runs, rows }, base, color, onbase) {
  const head = runs.map((run, n) => {
    const words = n === base ? "baseline" : "";
    const button = h("button", { type: "button", "aria-pressed": String(n === base), "data-trace": n,
      title: n === base ? "the others are compared to it" : `compare the others to ${run.name}` },
    swatch(color(n)), run.name, h("small", {}, words));
    button.addEventListener("click", () => onbase(n));
    return h("th", { scope: "col" }, button);
  });
  const body = rows.map(({ key, label, unit, hint, values }) => {
    const most = Math.max(...values.filter((v) => typeof v === "number").map(Math.abs), 0) || 1;
    const cells = values.map((value, n) => h("td", { "data-trace": n, title: n === base ? "" : difference(value, values[base], unit) },
      h("span", { class: "dkc-value" }, h("b", {}, told(value, unit)), n === base ? "" : h("span", { class: "dkc-ratio" }, ratio(value, values[base]))),
      h("i", { class: "dkc-bar", "aria-hidden": "true" }, h("i", {
        style: `width:${typeof value === "number" ? (100 * Math.abs(value)) / most : 0}%;background:${color(n)}` }))));
    return h("tr", { "data-key": key }, h("th", { scope: "row", title: hint }, label), cells);
  });
  return h("table", { class: "dkc-table" }, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, ""), head)), h("tbody", {}, body));
}

// Per rank and trace: the part of the time in communication, and of that in waiting.
export function meters({ runs }, names, rankColor, color) {
  const ranks = [...names.keys()];
  const shown = ranks.slice(0, MOST_RANKS);
  const rows = shown.map((rank, lane) => h("div", { class: "dkc-rank" },
    h("span", { class: "dkc-who" }, h("span", { class: "dk-dot", style: `background:${rankColor(lane)}` }), names.get(rank)),
    runs.map((run, n) => meter(run.figures.ranks.find((r) => r.rank === rank), run.name, rankColor(lane), color(n)))));
  const waits = runs.some((run) => run.figures.ranks.some((r) => r.waiting > 0.005));
  return h("section", { class: "dkc-ranks" },
    h("h4", {}, "in communication", h("small", {}, `${waits ? "waiting is pale · " : ""}bytes sent`)),
    h("div", { class: "dkc-meters" }, rows),
    ranks.length > MOST_RANKS ? h("p", { class: "dkv-muted" }, `and ${plural(ranks.length - MOST_RANKS, "more rank")}`) : "");
}

function meter(r, name, paint, own) {
  if (!r) return h("div", { class: "dkc-meter dkv-muted", title: `${name} has no such rank` }, swatch(own), h("i"), h("b", {}, "–"), h("small", {}, ""));
  const words = `${name}, ${r.name}: ${percent(r.busy)} in communication, ${percent(r.waiting)} waiting; ` +
    `${plural(r.messages, "message")} sent, ${humanBytes(r.bytes)}`;
  return h("div", { class: "dkc-meter", title: words, role: "img", "aria-label": words }, swatch(own),
    h("i", {}, h("i", { style: `width:${100 * Math.max(0, r.busy - r.waiting)}%;background:${paint}` }),
      h("i", { style: `width:${100 * Math.min(r.busy, r.waiting)}%;background:${paint};opacity:.4` })),
    h("b", {}, percent(r.busy)), h("small", {}, r.bytes ? humanBytes(r.bytes) : ""));
}

// -- losses -----------------------------------------------------------------------------

const MARGIN_OF = { top: 10, right: 14, bottom: 20, left: 44 };

// Losses of all traces; by: 0 over steps, 1 over seconds.
export function losses({ runs }, by, width, color) {
  const height = 170;
  const lines = runs.map((run, n) => [n, run.name, (run.loss?.points ?? [])])
    .filter(([, , points]) => points.length);
  const svg = d3.select(document.createElementNS("http://www.w3.org/2000/svg", "svg")).attr("class", "dkv-chart dkc-chart")
    .attr("width", width).attr("height", height).attr("role", "img");
  const all = lines.flatMap(([, , points]) => points);
  const ys = all.map((p) => p[2]).filter((y) => y !== null);
  const x = d3.scaleLinear([0, Math.max(1e-9, d3.max(all, (p) => p[by]))], [MARGIN_OF.left, width - MARGIN_OF.right]);
  const [low, high] = [Math.min(0, d3.min(ys)), Math.max(0, d3.max(ys))];
  const y = d3.scaleLinear([low, high > low ? high : low + 1], [height - MARGIN_OF.bottom, MARGIN_OF.top]);
  for (const tick of y.ticks(4)) {
    svg.append("path").attr("class", "dkc-grid").attr("d", `M${MARGIN_OF.left} ${y(tick)}H${width - MARGIN_OF.right}`);
    svg.append("text").attr("x", MARGIN_OF.left - 6).attr("y", y(tick) + 3.5).attr("text-anchor", "end").text(figure(tick));
  }
  for (const tick of x.ticks(5).filter((t) => by || Number.isInteger(t))) {
    svg.append("text").attr("x", x(tick)).attr("y", height - 5).attr("text-anchor", "middle").text(by && tick ? humanSeconds(tick) : tick);
  }
  const path = d3.line().defined((p) => p[2] !== null).x((p) => x(p[by])).y((p) => y(p[2]));
  for (const [n, , points] of lines) {
    svg.append("path").attr("class", "dkc-curve").attr("data-trace", n).attr("d", path(points)).attr("stroke", color(n))
      .attr("stroke-dasharray", DASHES[n % DASHES.length] || null);
    const last = points.filter((p) => p[2] !== null).at(-1);
    if (last) svg.append("circle").attr("cx", x(last[by])).attr("cy", y(last[2])).attr("r", 3).attr("fill", color(n));
  }
  const words = runs.filter((run) => run.loss).map((run) => `${run.name} ${told(run.loss.last, "x")} after ${plural(run.loss.steps, "step")}`);
  svg.attr("aria-label", `loss over ${by ? "time" : "steps"}: ${words.join(", ")}`);
  return svg.node();
}

export function lossKey({ runs }, color) {
  return h("ul", { class: "dk-legend" }, runs.map((run, n) => (run.loss ? h("li", {}, line(color(n), DASHES[n % DASHES.length]), run.name) : "")));
}

function line(color, dash) {
  const svg = d3.select(document.createElementNS("http://www.w3.org/2000/svg", "svg")).attr("width", 26).attr("height", 8).attr("aria-hidden", "true");
  svg.append("path").attr("d", "M0 4H26").attr("stroke", color).attr("stroke-width", 2.2).attr("stroke-dasharray", dash || null);
  return svg.node();
}

// -- one operation, and its counterparts ---------------------------------------------------

// found: per trace its bar or null; n: the trace that the reader points at; nth: from 0.
export function card(found, n, nth, stores, names, rankColor, color) {
  const bar = found[n];
  return [
    h("div", { class: "dk-tip-head" }, h("span", { class: "dk-dot", style: `background:${rankColor}` }),
      h("strong", {}, call(bar, stores[n])), h("span", { class: "dk-state" }, ordinal(bar, nth, stores[n]))),
    h("div", { class: "dkc-card" }, found.map((other, k) => [
      h("span", {}, swatch(color(k)), names[k]),
      other ? h("span", {}, call(other, stores[k])) : h("span", { class: "dkv-muted" }, "has none"),
      h("span", {}, other ? `at ${humanSeconds(other.start - stores[k].frame.start)}` : ""),
      h("span", {}, other ? took(other) : ""),
      h("span", { class: "dkc-delta" }, k === n || !other ? "" : apart(other, stores[k], bar, stores[n]))])),
    bar.where ? h("div", { class: "dk-code dkv-muted" }, bar.where) : null,
  ].filter(Boolean);
}

const took = (bar) => (bar.end === null ? "not finished" : `took ${humanSeconds(bar.end - bar.start)}`);

function ordinal(bar, nth, store) {
  return `${bar.kind === "mark" ? "computation" : "operation"} ${(nth + 1).toLocaleString("en")} of ${store.name(bar.rank)}`;
}

// How much later than the one pointed at another one begins, and how much longer it takes.
function apart(other, theirs, bar, ours) {
  const later = other.start - theirs.frame.start - (bar.start - ours.frame.start);
  const words = [`${humanSeconds(Math.abs(later))} ${later < 0 ? "earlier" : "later"}`];
  if (other.end !== null && bar.end !== null) {
    const longer = other.end - other.start - (bar.end - bar.start);
    words.push(`${humanSeconds(Math.abs(longer))} ${longer < 0 ? "shorter" : "longer"}`);
  }
  return words.join(", ");
}

export function sentence(found, n, nth, stores, names) {
  const bar = found[n];
  const others = found.map((other, k) => (k === n ? "" : other
    ? `${names[k]}: ${call(other, stores[k])}, ${apart(other, stores[k], bar, stores[n])}` : `${names[k]} has none`));
  return [`${names[n]}, ${ordinal(bar, nth, stores[n])}: ${call(bar, stores[n])}, ${took(bar)}`, ...others].filter(Boolean).join("; ");
}
