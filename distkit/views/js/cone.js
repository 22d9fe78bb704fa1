// What happens before an operation and after it. Pure: a store in, sets of operations out.

// Through messages, collectives and each rank's own order: {past, future}.
export function cone(store, chosen) {
  const ranks = byRank(store);
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

function byRank(store) {
  const ranks = new Map();
  for (let i = 0; i < store.count; i++) {
    const rank = rankOf(store, i);
    if (!ranks.has(rank)) ranks.set(rank, []);
    ranks.get(rank).push(i);
  }
  for (const list of ranks.values()) list.sort((i, j) => store.start[i] - store.start[j] || i - j);
  return ranks;
}

const rankOf = (store, i) => store.tracks[store.track[i]].rank;
