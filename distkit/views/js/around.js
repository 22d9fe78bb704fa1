// The words around the picture: heading, notices, legend, and the sums underneath.

import { h } from "./dom.js";
import { humanBytes, humanSeconds, plural } from "./numbers.js";

const LEGEND = [
  ["message", "message"],
  ["send", "send"],
  ["recv", "receive"],
  ["collective", "collective"],
  ["request", "request to a server"],
  ["store", "store"],
  ["mark", "computation"],
  ["paused", "paused"],
  ["open", "not finished"],
  ["touch", "buffer used too early"],
  ["failed", "failed"],
];
const MANY = 12;

export function heading({ frame }) {
  return [
    h("strong", {}, frame.title || "Timeline"),
    h("span", { class: "dk-facts" }, frame.facts.join(" · ")),
    frame.live ? h("span", { class: "dk-live" }, "live") : null,
  ].filter(Boolean);
}

export function notices({ frame }) {
  return frame.notices.map((text) => h("li", {}, text));
}

export function legend(store) {
  const kinds = store.kinds();
  return LEGEND.filter(([kind]) => kinds.has(kind)).map(([kind, text]) =>
    h("li", {}, h("i", { class: `dk-key dk-${kind}` }), text));
}

export function sums(store, color) {
  const { frame } = store;
  const tile = (value, label, detail) =>
    h("div", { class: "dk-tile" }, h("b", {}, value), h("span", {}, label, detail ? ` · ${detail}` : ""));
  const noun = (n, word) => plural(n, word).replace(/^\S+ /, "");
  return [
    frame.messages || !frame.collectives
      ? tile(frame.messages.toLocaleString("en"), noun(frame.messages, "message"),
        frame.message_bytes ? humanBytes(frame.message_bytes) : "") : null,
    frame.collectives
      ? tile(frame.collectives.toLocaleString("en"), noun(frame.collectives, "collective"),
        frame.collective_bytes ? humanBytes(frame.collective_bytes) : "") : null,
    tile(frame.end > frame.start ? humanSeconds(frame.end - frame.start) : "0 s", "first to last event"),
    frame.lanes.length ? busy(frame.lanes, color) : null,
  ].filter(Boolean);
}

// Per rank: the part of the time spent in communication, and of that in waiting (paler).
function busy(lanes, color) {
  const percent = (x) => `${Math.round(100 * x)} %`;
  const label = h("span", {}, "time in communication", lanes.some(({ waiting }) => waiting > 0.005) ? ", of which waiting (pale)" : "");
  if (lanes.length > MANY) {
    const range = (all) => [...new Set([Math.min(...all), Math.max(...all)].map(percent))].join(" to ");
    return h("div", { class: "dk-tile" }, h("b", {}, range(lanes.map((lane) => lane.busy))), label,
      h("span", {}, ` · waiting ${range(lanes.map((lane) => lane.waiting))}`));
  }
  const meters = lanes.map((lane) => {
    const { messages, bytes, waiting } = lane;
    const words = `${lane.name}: ${plural(messages, "message")} sent, ${humanBytes(bytes)}; ` +
      `${percent(lane.busy)} in communication, ${percent(waiting)} waiting`;
    const paint = `background:${color(lane.rank)}`;
    const some = lanes.some((one) => one.messages);
    const sent = messages ? `${messages.toLocaleString("en")} sent · ${humanBytes(bytes)}` : "nothing sent";
    return h("div", { class: "dk-meter", title: words },
      h("span", {}, lane.name),
      h("i", {}, h("i", { style: `width:${100 * Math.max(0, lane.busy - waiting)}%;${paint}` }),
        h("i", { style: `width:${100 * Math.min(lane.busy, waiting)}%;${paint};opacity:.4` })),
      h("b", {}, percent(lane.busy)),
      some ? h("small", {}, sent) : null);
  });
  return h("div", { class: "dk-busy" }, label, h("div", { class: "dk-meters" }, meters));
}

export function alternative({ frame }) {
  const told = [
    frame.title || "Timeline", ...frame.facts, plural(frame.messages, "message"),
    plural(frame.collectives, "collective"), ...frame.notices,
  ];
  return `Space-time diagram. ${told.join(", ")}.`;
}
