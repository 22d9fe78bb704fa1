// What the reader looks for: words of a query, all of which an operation must match.
//   all_reduce  rank:2  group:tp  bytes>=4k  failed  train.py:31

import { grouped, plural } from "./numbers.js";

const UNITS = { "": 1, k: 1024, m: 1024 ** 2, g: 1024 ** 3 };
const BYTES = /^bytes(>=|<=|>|<|=)(\d+(?:\.\d+)?)([kmg]?)i?b?$/;
const COMPARE = { ">=": (a, b) => a >= b, "<=": (a, b) => a <= b, ">": (a, b) => a > b,
  "<": (a, b) => a < b, "=": (a, b) => a === b };

// The operations that match: {bars, arrows}; an arrow matches with either of its ends.
export function search(store, text) {
  const tests = text.toLowerCase().trim().split(/\s+/).filter(Boolean).map(test);
  const fits = (kind, value) => tests.every((one) => one[kind]?.(value, store) ?? true);
  const looks = store.looks.map((look) => fits("look", look));
  const lanes = store.tracks.map(({ rank }) => fits("rank", rank));
  const [bars, arrows] = [new Set(), new Set()];
  for (let i = 0; i < store.count; i++) {
    if (looks[store.look[i]] && lanes[store.track[i]]) bars.add(i);
  }
  for (let a = 0; a < store.arrows; a++) {
    if (bars.has(store.send[a]) || bars.has(store.recv[a])) arrows.add(a);
  }
  return { bars, arrows };
}

function test(word) {
  const bytes = BYTES.exec(word);
  if (bytes) {
    const [, sign, amount, unit] = bytes;
    const most = amount * UNITS[unit];
    return { look: ({ kind, nbytes }) => kind !== "mark" && COMPARE[sign](nbytes, most) };
  }
  const [, key, value] = /^(rank|group|op):(.+)$/.exec(word) ?? [];
  if (key === "rank") {
    const named = (rank, store) => store.name(rank).toLowerCase() === value;
    return { rank: (rank, store) => String(rank) === value || named(rank, store) };
  }
  if (key === "group") return { look: ({ group }) => (group ?? "world").toLowerCase() === value };
  if (key === "op") return { look: ({ op }) => op === value };
  return { look: (look) => [look.op, look.state, look.label, look.where, look.dtype, look.group]
    .some((told) => told?.toLowerCase().includes(word)) };
}

export const tally = ({ bars }, store) =>
  `${grouped(bars.size)} of ${plural(store.count, "operation")}`;
