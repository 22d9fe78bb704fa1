// Who waits for whom: waiting time, the critical path, and what happens before and after. Pure:
// a store in, numbers out.

const SOON = 1e-9; // seconds: clocks are no finer

// Seconds that each operation waits for the last one to arrive, from its start on.
export function waits(store) {
  const { start, end, tie, into, out, recv, sent } = store;
  const found = new Float64Array(store.count);
  const last = lastStarts(store);
  const kinds = store.looks.map(({ kind, op }) => (op === "pull" ? "recv" : kind)); // it waits for its answer
  for (let i = 0; i < store.count; i++) {
    if (store.paused(i)) continue;
    const kind = kinds[store.look[i]];
    let until = -Infinity;
    if (tie[i] >= 0) until = last[tie[i]];
    else if (kind === "recv" && into[i] >= 0) until = sent[into[i]];
    else if (kind === "send" && out[i] >= 0 && recv[out[i]] >= 0) until = start[recv[out[i]]];
    const most = Number.isNaN(end[i]) ? store.frame.end : end[i];
    found[i] = Math.max(0, Math.min(until || most, most) - start[i]);
  }
  return found;
}

function lastStarts({ count, tie, start }) {
  const last = new Float64Array(tie.reduce((a, b) => Math.max(a, b), -1) + 1).fill(-Infinity);
  for (let i = 0; i < count; i++) if (tie[i] >= 0) last[tie[i]] = Math.max(last[tie[i]], start[i]);
  return last;
}

// Per lane: messages sent, their bytes, and the part of the time spent waiting.
export function statistics(store) {
  const rows = store.frame.lanes.map(() => ({ messages: 0, bytes: 0, waiting: 0 }));
  const seconds = store.frame.end - store.frame.start;
  const mine = store.tracks.map(({ rank }) => rows[store.laneOf.get(rank)]);
  for (let a = 0; a < store.arrows; a++) {
    const row = store.send[a] < 0 ? null : mine[store.track[store.send[a]]];
    if (!row || Number.isNaN(store.sent[a])) continue;
    row.messages += 1;
    row.bytes += store.weight(a);
  }
  const waited = waits(store);
  store.tracks.forEach(({ items }, t) => { for (const i of items) mine[t].waiting += waited[i]; });
  return rows.map((row) => ({ ...row, waiting: Math.min(1, row.waiting / (seconds || 1)) }));
}

// The chain that made the run last so long, from its end back: an operation that waited is
// explained by the last to arrive, any other by what its rank did before.
export function criticalPath(store) {
  const [bars, arrows] = [new Set(), new Set()];
  if (!store.count) return { bars, arrows };
  const [waited, skip] = [waits(store), around(store)];
  const ranks = byRank(store, (i) => finish(store, i), (i) => !skip[i]);
  const final = (i) => (Number.isNaN(store.end[i]) ? store.frame.end : store.end[i]);
  let at = -1;
  for (let i = 0; i < store.count; i++) if (!skip[i] && !(at >= 0 && final(i) <= final(at))) at = i;
  while (at >= 0 && !bars.has(at)) {
    bars.add(at);
    const cause = waited[at] > SOON ? blamed(store, at) : -1;
    if (cause >= 0) {
      for (const a of [store.into[at], store.out[at]]) {
        if (a >= 0 && (store.send[a] === cause || store.recv[a] === cause)) arrows.add(a);
      }
      if (bars.has(cause)) break;
      bars.add(at = cause);
    }
    at = before(store, ranks.get(rankOf(store, at)), store.start[at], bars);
  }
  return { bars, arrows };
}

const finish = (store, i) => (Number.isNaN(store.end[i]) ? Infinity : store.end[i]);
const rankOf = (store, i) => store.tracks[store.track[i]].rank;

function blamed(store, i) {
  if (store.tie[i] >= 0) {
    const members = store.members(store.tie[i]);
    return members.reduce((a, b) => (store.start[b] > store.start[a] ? b : a));
  }
  if (store.into[i] >= 0 && store.send[store.into[i]] >= 0) return store.send[store.into[i]];
  return store.out[i] >= 0 ? store.recv[store.out[i]] : -1;
}

// The last operation of a list, sorted by end, that had ended by then and is not known yet; -1
// if there is none. What takes no time at all ends when it starts.
function before(store, list, time, known) {
  let [low, high] = [0, list.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (finish(store, list[middle]) <= time + SOON) low = middle + 1;
    else high = middle;
  }
  while (low && known.has(list[low - 1])) low -= 1;
  return low ? list[low - 1] : -1;
}

// Whether an operation is a mark around communication: it explains nothing that they do not.
function around(store) {
  const found = new Uint8Array(store.count);
  for (const list of byRank(store, (i) => store.start[i]).values()) {
    let next = Infinity; // when the next communication begins
    for (const i of list.reverse()) {
      if (store.looks[store.look[i]].kind !== "mark") next = store.start[i];
      else found[i] = next < finish(store, i);
    }
  }
  return found;
}

function byRank(store, key, wanted = () => true) {
  const ranks = new Map();
  for (let i = 0; i < store.count; i++) {
    if (!wanted(i)) continue;
    const rank = rankOf(store, i);
    if (!ranks.has(rank)) ranks.set(rank, []);
    ranks.get(rank).push(i);
  }
  for (const list of ranks.values()) list.sort((i, j) => key(i) - key(j) || i - j);
  return ranks;
}

// What happens before an operation and after it, through messages, collectives and each rank's
// own order: {past, future}, sets of operations.
export function cone(store, chosen) {
  const ranks = byRank(store, (i) => store.start[i]);
  const place = new Int32Array(store.count);
  for (const list of ranks.values()) list.forEach((i, n) => { place[i] = n; });
  const reach = (step) => {
    const [found, frontier, todo] = [new Set(), new Map(), [chosen]];
    while (todo.length) {
      const start = todo.pop();
      const rank = rankOf(store, start);
      const list = ranks.get(rank);
      const stop = frontier.get(rank) ?? (step < 0 ? -1 : list.length); // all beyond it are known
      for (let n = place[start]; step < 0 ? n > stop : n < stop; n += step) {
        found.add(list[n]);
        todo.push(...neighbours(store, list[n], step));
      }
      const edge = step < 0 ? Math.max : Math.min;
      frontier.set(rank, edge(stop, place[start]));
    }
    found.delete(chosen);
    return found;
  };
  return { past: reach(-1), future: reach(1) };
}

function neighbours(store, i, step) {
  const a = step < 0 ? store.into[i] : store.out[i];
  const other = a < 0 ? -1 : (step < 0 ? store.send : store.recv)[a];
  return [...(other < 0 ? [] : [other]), ...store.members(store.tie[i]).filter((j) => j !== i)];
}
