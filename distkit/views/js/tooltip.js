// Details of a bar or arrow, as a card next to the pointer and as a sentence.

import { dot, h } from "./dom.js";
import {
  clamp, figure, grouped, humanBytes, humanSeconds, largest, nonFiniteCounts, plural,
} from "./numbers.js";
import { isOpen, isPaused } from "./store.js";

const MAX_NUMBERS = 8; // maximum number of values shown one by one

export function sentence(item, store) {
  const [name, state] = title(item, store);
  return [`${name}, ${state}`, ...facts(item, store).map(([k, v]) => `${k} ${v}`)].join("; ");
}

// Shows a card near the pointer, within the window.
export function placeTip(tip, x, y) {
  if (!tip.matches(":popover-open")) tip.showPopover();
  const { width, height } = tip.getBoundingClientRect();
  const top = y + 18 + height < innerHeight || y < height + 18 ? y + 18 : y - height - 12;
  tip.style.left = `${clamp(x + 14, 8, innerWidth - width - 8)}px`;
  tip.style.top = `${clamp(top, 8, Math.max(8, innerHeight - height - 8))}px`;
}

export function card(item, store, color) {
  const [name, state, alarm] = title(item, store);
  const [before, after] = (item.src === undefined ? item : item.send)?.values ?? [];
  return [
    h("div", { class: "dk-tip-head" },
      dot(color), h("strong", {}, name),
      h("span", { class: alarm ? "dk-state dk-alarm" : "dk-state" }, state)),
    h("dl", {}, facts(item, store).map(([key, value]) => [
      h("dt", {}, key), h("dd", { class: key === "line" ? "dk-code" : null }, value)])),
    before || after ? values(before, after) : null,
  ];
}

function title(item, store) {
  if (item.src !== undefined) {
    const what = item.op === "send" ? "message" : `${item.op} message`;
    if (item.received !== null && item.sent !== null) return [what, "delivered", false];
    const { live } = store.frame;
    if (item.sent === null) return [what, live ? "not sent yet" : "never sent", !live];
    return [what, live ? "in transit" : "not received", !live];
  }
  const name = item.kind === "mark" ? item.label || "computation" : item.op;
  if (isPaused(item)) return [name, "paused before this call", false];
  if (item.op === "touch") return [name, "too early", true];
  if (!isOpen(item))
    return [name, item.end === null ? "open" : item.state, item.state === "failed"];
  if (item.state === "blocked" && store.frame.live) return [name, "blocked", false];
  return [name, store.frame.live ? "running" : `${store.frame.open} ${item.op}`, !store.frame.live];
}

function facts(item, store) {
  const rows = item.src === undefined ? ofBar(item, store) : ofArrow(item, store);
  return rows.filter(([, value]) => value !== null && value !== undefined && value !== "");
}

function ofBar(bar, store) {
  const since = bar.start - store.frame.start;
  const others = store.members(bar.collective).filter((i) => i !== bar.i).map((i) => store.bar(i));
  return [
    ["on", store.name(bar.rank)],
    [peerWord(bar), bar.peer === undefined ? null : store.name(bar.peer)],
    ["with", names(others.map((other) => other.rank), store)],
    ["tensor", tensor(bar)],
    ["size", bar.kind === "mark" || !bar.nbytes ? null : humanBytes(bar.nbytes)],
    ["took", bar.end === null ? null : humanSeconds(bar.end - bar.start)],
    totalDuration(bar, others, store),
    ["started at", humanSeconds(since)],
    ...details(bar, store),
  ];
}

// The time from the first start to the last end of a collective, or the duration of a message.
function totalDuration(bar, others, store) {
  if (others.length) {
    const ends = [bar, ...others].map(({ end }) => end);
    const begin = Math.min(bar.start, ...others.map(({ start }) => start));
    return ["all ranks", ends.includes(null) ? null : humanSeconds(Math.max(...ends) - begin)];
  }
  const a = bar.kind === "send" ? store.out[bar.i] : bar.kind === "recv" ? store.into[bar.i] : -1;
  const took = a < 0 ? NaN : store.received[a] - store.sent[a];
  if (Number.isNaN(took)) return ["message", null];
  const [send, recv] = [store.send[a], store.recv[a]].map((i) => store.bar(i).op);
  return ["message", `${humanSeconds(took)}, from the start of ${send} to the end of ${recv}`];
}

function ofArrow(arrow, store) {
  const bar = arrow.send ?? arrow.recv;
  const at = (time) => (time === null ? null : humanSeconds(time - store.frame.start));
  const delivered = arrow.sent !== null && arrow.received !== null;
  return [
    ["from", store.name(arrow.src)],
    ["to", store.name(arrow.dst)],
    ["tensor", tensor(bar)],
    ["size", humanBytes(arrow.nbytes)],
    ["took", delivered ? humanSeconds(arrow.received - arrow.sent) : null],
    ["sent at", at(arrow.sent)],
    ["received at", at(arrow.received)],
    ...details({ ...bar, ...arrow, kind: "message" }, store),
  ];
}

function details(item, store) {
  const members = store.frame.groups[item.group];
  return [
    [item.kind === "request" || item.kind === "message" ? "key" : "label",
      item.kind === "mark" ? null : item.label],
    ["tag", item.tag || null],
    ["group", item.group && members ? `${item.group} (${names(members, store)})` : item.group],
    ["GPU", item.gpu],
    ["line", item.where],
    ["values", item.values || item.kind === "mark" || !store.values.size ? null : "not available for this operation"],
  ];
}

function peerWord(bar) {
  return { send: "to", recv: "from", request: "server", collective: "root" }[bar.kind] ?? "peer";
}

function names(ranks, store) {
  const shown = ranks.slice(0, 8).map((rank) => store.name(rank)).join(", ");
  return ranks.length > 8 ? `${shown} and ${ranks.length - 8} more` : shown;
}

export function tensor(bar) {
  return bar?.dtype ? `${bar.dtype} [${(bar.shape ?? []).join(", ")}]` : null;
}

// -- values: before and after, on one scale --------------------------------------------

function values(before, after) {
  const maxMagnitude = largest([before, after].flatMap((s) => s?.values ?? []));
  return h("div", { class: "dk-values" },
    [["before", before], ["after", after]].filter(([, summary]) => summary).map(([when, summary]) => [
      h("span", {}, when), h("div", {}, strip(summary, maxMagnitude),
        h("div", { class: "dk-numbers" }, asText(summary)), alarm(summary))]));
}

// Values as colors; maxMagnitude is the magnitude that is shown in full color.
export function strip(summary, maxMagnitude) {
  const cells = summary.values.map((v) => h("i", { class: nonFiniteClass(v), style: heat(v, maxMagnitude) }));
  return h("div", { class: "dk-strip", "aria-hidden": "true" }, cells);
}

function asText(s) {
  if (s.size <= MAX_NUMBERS) return `[${s.values.map(figure).join(", ")}]`;
  const count = `${grouped(s.size)} values${s.sampled ? ", sampled" : ""}`;
  return `${figure(s.min)} to ${figure(s.max)} · norm ${figure(s.norm)} · ${count}`;
}

const nonFiniteClass = (v) => (Number.isFinite(v) ? null : v === "nan" ? "dk-nan" : "dk-inf");

// Zero has the color of the page; positive and negative values have the same colors as in scenes.
function heat(v, maxMagnitude) {
  const percentage = Math.min(100, (100 * Math.abs(v)) / maxMagnitude).toFixed(1);
  return Number.isFinite(v) ? `background:color-mix(in srgb, var(--dk-${v < 0 ? "negative" : "positive"}) ${percentage}%, transparent)` : "";
}

function alarm(summary) {
  const text = nonFiniteCounts(summary);
  if (!text) return null;
  const all = plural(summary.values.length, "value");
  return h("div", { class: "dk-alarm" }, `${text} among ${all}`);
}
