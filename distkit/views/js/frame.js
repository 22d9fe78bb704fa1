// The frame of the picture: heading, notices, legend, and the totals below it.

import { h } from "./dom.js";
import { grouped, humanBytes, humanSeconds, percent, plural } from "./numbers.js";

const LEGEND = [
  ["message", "message"], ["lost", "message not delivered"], ["send", "send"],
  ["recv", "receive"], ["collective", "collective"], ["request", "request to a server"],
  ["store", "store"],
  ["workF", "forward"], ["workB", "backward"], ["workI", "gradient of inputs"],
  ["workW", "gradient of weights"], ["work", "computation"], ["paused", "paused"],
  ["open", "not finished"], ["touch", "buffer used too early"], ["failed", "failed"],
];
const MAX_DETAILED = 4; // maximum number of ranks for which details are shown
const MAX_SEPARATE = 12; // maximum number of ranks for which separate meters are shown

export function heading({ title, facts, live }) {
  return [
    h("strong", {}, title || "Timeline"),
    h("span", { class: "dk-facts" }, facts.join(" · ")),
    live ? h("span", { class: "dk-live" }, "live") : null,
  ].filter(Boolean);
}

export function notices(picture) {
  return [...picture.notices.map((text) => h("li", {}, text)),
    ...picture.notes.map((text) => h("li", { class: "dkv-note" }, text))];
}

export function legend(store) {
  const kinds = store.kinds();
  const sign = (kind) =>
    h("i", { class: `dk-key dk-${kind}`, "data-live": store.frame.live, style: `--dk-key: var(--dk-${kind})` });
  return LEGEND.filter(([kind]) => kinds.has(kind)).map(([kind, text]) =>
    h("li", {}, sign(kind), kind === "lost" && store.frame.live ? `${text} yet` : text));
}

export function totals({ frame }, color) {
  if (frame.bare) return [];
  const { messages, message_bytes, collectives, collective_bytes, start, end, lanes,
    host_totals: hostTotals = [] } = frame;
  const tile = (value, label, title = null) =>
    h("div", { class: "dk-tile", title }, h("b", {}, value), h("span", {}, label));
  const countTile = (n, word, bytes) => tile(grouped(n),
    plural(n, word).replace(/^\S+ /, "") + (bytes ? ` · ${humanBytes(bytes)}` : ""));
  return [
    messages ? countTile(messages, "message", message_bytes) : null,
    collectives ? countTile(collectives, "collective", collective_bytes) : null,
    tile(end > start ? humanSeconds(end - start) : "0 s", "first to last event"),
    ...hostTotals.map((parts) => tile(...parts)),
    lanes.length ? busy(lanes, color) : null,
  ].filter(Boolean);
}

// The fraction of each rank's time in communication; the time spent waiting is hatched.
function busy(lanes, color) {
  const waits = lanes.some(({ waiting }) => waiting > 0.005);
  const label = h("span", {}, "time in communication", waits ? ", including waiting (hatched)" : "");
  if (lanes.length > MAX_SEPARATE) {
    const range = (all) =>
      [...new Set([Math.min(...all), Math.max(...all)].map(percent))].join(" to ");
    return h("div", { class: "dk-tile" }, h("b", {}, range(lanes.map((lane) => lane.busy))), label,
      h("span", {}, ` · waiting ${range(lanes.map((lane) => lane.waiting))}`));
  }
  const detailed = lanes.length <= MAX_DETAILED && lanes.some((lane) => lane.messages);
  const meters = lanes.map((lane) => {
    const { words, bar } = shares(lane, color(lane.rank));
    const { name, messages, bytes } = lane;
    const sent = `${grouped(messages)} sent`;
    const size = bytes ? ` · ${humanBytes(bytes)}` : "";
    const details = waits ? `${sent} · waiting ${percent(lane.waiting)}` : sent + size;
    return h("div", { class: "dk-meter", title: words }, h("span", {}, name), bar,
      h("b", {}, percent(lane.busy)), detailed ? h("small", {}, details) : null);
  });
  return h("div", { class: "dk-busy" }, label, h("div", { class: "dk-meters" }, meters));
}

// The fractions of a rank's time, as text and as a bar; style sheets mark the waiting part.
function shares({ name, busy: spent, waiting, messages, bytes }, color) {
  const part = (share, kind) =>
    h("i", { class: kind, style: `width:${100 * Math.max(0, share)}%;color:${color}` });
  return {
    words: `${name}: ${percent(spent)} in communication, ${percent(waiting)} waiting; ` +
      `${plural(messages, "message")} sent, ${humanBytes(bytes)}`,
    bar: h("i", {}, part(spent - waiting), part(Math.min(spent, waiting), "dk-waited")),
  };
}

export function altText({ frame }) {
  const parts = [
    frame.title || "Timeline", ...frame.facts,
    ...(frame.bare ? [] : [plural(frame.messages, "message"),
      plural(frame.collectives, "collective"), ...frame.notices, ...frame.notes]),
  ];
  return `Space-time diagram. ${parts.join(", ")}.`;
}
