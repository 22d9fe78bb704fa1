// The differences of several traces: a table of figures, the ranks, losses, and one operation.

import { chart } from "./charts.js";
import { dot, h, muted, s } from "./dom.js";
import { figure, grouped, humanBytes, humanSeconds, percent, plural } from "./numbers.js";
import { call } from "./painter.js";
import { shares } from "./around.js";
import { d3 } from "./vendor/d3.js";

const MOST_RANKS = 16; // ranks beyond this number are not told one by one
const DASHES = ["", "7 3", "2 2.5", "9 3 2 3"];
const WRITE = { s: humanSeconds, B: humanBytes, n: grouped, "%": percent, x: figure };

function told(value, unit) {
  if (value === null || value === undefined) return "–";
  return typeof value === "string" ? figure(value) : WRITE[unit](value);
}

// A value as a multiple of the baseline's.
function ratio(value, base) {
  if (typeof value !== "number" || typeof base !== "number") return "";
  if (value === base) return value ? "=" : "";
  if (!base) return "";
  const times = value / base;
  if (times && Math.abs(times) < 0.001) return "<0.001×";
  return `${times >= 100 ? grouped(Math.round(times)) : Number(times.toPrecision(2))}×`;
}

function difference(value, base, unit) {
  if (typeof value !== "number" || typeof base !== "number") return "";
  const by = value - base;
  return `${by < 0 ? "−" : "+"}${told(Math.abs(by), unit)}`;
}

export const swatch = (color) => h("i", { class: "dkc-swatch", style: `background:${color}` });

// A row per figure; a click on a name makes that trace the baseline.
export function table({ runs, rows }, base, color, onbase) {
  const head = runs.map((run, n) => {
    const title = n === base ? `${run.name}: the baseline of the comparison`
      : `compare the others to ${run.name}`;
    return h("th", { scope: "col" }, h("button",
      { type: "button", "aria-pressed": String(n === base), "data-trace": n, title,
        onclick: () => onbase(n) },
      swatch(color(n)), h("span", { class: "dkc-name" }, run.name),
      h("small", {}, n === base ? "baseline" : "")));
  });
  const known = ({ key, values }) => key !== "seconds" && values[0] !== null
    && values.every((value) => value === values[0]);
  const same = rows.filter(known).map(({ label, unit, hint, values }, i) => [i ? " · " : "",
    h("span", { title: hint }, `${label} ${told(values[0], unit)}`)]);
  const body = rows.filter((row) => !known(row)).map(({ key, label, unit, hint, values }) => {
    const number = (value) => (typeof value === "number" ? Math.abs(value) : 0);
    const most = unit === "%" ? 1 : Math.max(...values.map(number), 0) || 1;
    const cell = (value, n) => {
      const [more, times] = n === base ? ["", ""]
        : [difference(value, values[base], unit), ratio(value, values[base])];
      const bar = `width:${(100 * number(value)) / most}%;background:${color(n)}`;
      return h("td", { "data-trace": n, title: more },
        h("span", { class: "dkc-value" }, h("b", {}, told(value, unit)),
          n === base ? "" : h("span", { class: "dkc-ratio" }, times)),
        h("i", { class: "dkc-bar", "aria-hidden": "true" }, h("i", { style: bar })));
    };
    return h("tr", { "data-key": key }, h("th", { scope: "row", title: hint }, label),
      values.map(cell));
  });
  return h("table", { class: "dkc-table" },
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }), head)), h("tbody", {}, body),
    same.length ? h("tfoot", {}, h("tr", {}, h("td", { colspan: runs.length + 1 },
      "the same in all: ", same))) : "");
}

// Per rank and trace: the part of the time in communication, and of that in waiting.
export function meters({ runs, rows: figures }, names, rankColor, color) {
  const ranks = [...names.keys()];
  const rows = ranks.slice(0, MOST_RANKS).map((rank, lane) => {
    const found = (run) => run.figures.ranks.find((r) => r.rank === rank);
    return h("div", { class: "dkc-rank" },
      h("span", { class: "dkc-who" }, dot(rankColor(lane)), names.get(rank)),
      runs.map((run, n) => meter(found(run), run.name, rankColor(lane), color(n))));
  });
  const waits = runs.some((run) => run.figures.ranks.some((r) => r.waiting > 0.005));
  const more = ranks.length - MOST_RANKS;
  return h("section", { class: "dkc-ranks" },
    h("h4", {}, h("span", { title: figures.find(({ key }) => key === "busy")?.hint },
      "in communication"), h("small", {}, waits ? "waiting is faint" : "",
      h("span", { class: "dkc-sent" }, `${waits ? " · " : ""}bytes sent`))),
    h("div", { class: "dkc-meters" }, rows),
    more > 0 ? h("p", { class: "dkv-muted" }, `and ${plural(more, "more rank")}`) : "");
}

function meter(r, name, paint, own) {
  if (!r) {
    return h("div", { class: "dkc-meter dkv-muted", title: `${name} has no such rank` },
      swatch(own), h("i"), h("b", {}, "–"), h("small"));
  }
  const { words, bar } = shares(r, paint);
  const title = `${name}, ${words}`;
  return h("div", { class: "dkc-meter", title, role: "img", "aria-label": title }, swatch(own), bar,
    h("b", {}, percent(r.busy)), h("small", {}, r.bytes ? humanBytes(r.bytes) : ""));
}

// -- losses -----------------------------------------------------------------------------

const MARGIN = { top: 10, right: 14, bottom: 20, left: 44 };
const dash = (n) => DASHES[n % DASHES.length] || null;

// Losses of all traces; by: 0 over steps, 1 over seconds.
export function losses({ runs }, by, width, color) {
  const lines = runs.map((run, n) => {
    const points = (run.loss?.points ?? []).map((p) => [p[by], p[2]]);
    return { points, dots: points.filter(([, y]) => y !== null).slice(-1), color: color(n),
      "data-trace": n, "stroke-width": 2, "stroke-dasharray": dash(n) };
  }).filter(({ points }) => points.length);
  const all = lines.flatMap(({ points }) => points);
  const [low, high] = d3.extent([0, ...all.map(([, y]) => y).filter((y) => y !== null)]);
  const seconds = (x) => (x ? humanSeconds(x) : 0);
  const words = runs.filter((run) => run.loss).map(({ name, loss }) =>
    `${name} ${told(loss.last, "x")} after ${plural(loss.steps, "step")}`);
  return chart(lines, { kind: "dkc-chart", width, height: 170, margin: MARGIN,
    label: `loss over ${by ? "time" : "steps"}: ${words.join(", ")}`,
    xs: [0, Math.max(1e-9, d3.max(all, ([x]) => x))], ys: [low, high > low ? high : low + 1],
    xTicks: (x) => x.ticks(5).filter((t) => by || Number.isInteger(t))
      .map((t) => [t, by ? seconds(t) : t]),
    yTicks: (y) => y.ticks(4).map((t) => [t, figure(t)]) });
}

export function lossKey({ runs }, color) {
  const line = (n) => s("svg", { width: 26, height: 8, "aria-hidden": "true" }, s("path", {
    d: "M0 4H26", stroke: color(n), "stroke-width": 2.2, "stroke-dasharray": dash(n) }));
  return h("ul", { class: "dk-legend" },
    runs.map((run, n) => (run.loss ? h("li", {}, line(n), run.name) : "")));
}

// -- one operation, and its counterparts ---------------------------------------------------

// found: per trace its bar or null; n: the trace that the reader points at; nth: from 0.
export function card(found, n, nth, stores, names, rankColor, color) {
  const bar = found[n];
  return [
    h("div", { class: "dk-tip-head" }, dot(rankColor), h("strong", {}, call(bar, stores[n])),
      h("span", { class: "dk-state" }, ordinal(bar, nth, stores[n]))),
    h("div", { class: "dkc-card" }, found.map((other, k) => [
      h("span", {}, swatch(color(k)), names[k]),
      other ? h("span", {}, call(other, stores[k])) : muted("has none"),
      h("span", {}, other ? `at ${humanSeconds(other.start - stores[k].frame.start)}` : ""),
      h("span", {}, other ? took(other) : ""),
      h("span", { class: "dkc-delta" },
        k === n || !other ? "" : apart(other, stores[k], bar, stores[n]))])),
    bar.where ? h("div", { class: "dk-code dkv-muted" }, bar.where) : null,
  ].filter(Boolean);
}

function took({ start, end }) {
  return end === null ? "not finished" : `took ${humanSeconds(end - start)}`;
}

function ordinal(bar, nth, store) {
  const what = bar.kind === "mark" ? "computation" : "operation";
  return `${what} ${grouped(nth + 1)} of ${store.name(bar.rank)}`;
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
  const beside = (other, k) => (other
    ? `${names[k]}: ${call(other, stores[k])}, ${apart(other, stores[k], bar, stores[n])}`
    : `${names[k]} has none`);
  const own = `${names[n]}, ${ordinal(bar, nth, stores[n])}: ${call(bar, stores[n])}, ${took(bar)}`;
  return [own, ...found.map(beside).filter((_, k) => k !== n)].join("; ");
}
