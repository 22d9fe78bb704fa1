// What a parameter server's run is like at a moment: everything that has begun and not ended.

export const order = d3.bisector((x) => x); // of sorted numbers

const lasts = (time) => ([, , begin, end]) => begin <= time && (end === null || end > time);

function grouped(lists, by) {
  const found = new Map();
  for (const one of lists) {
    if (found.has(one[by])) found.get(one[by]).push(one);
    else found.set(one[by], [one]);
  }
  return found;
}

export class Moments {
  constructor(picture, script) {
    const { updates, status, base } = picture;
    Object.assign(this, { picture, script });
    this.updates = grouped(updates, 0);
    this.status = grouped(status, 1);
    this.changes = new Map([...this.status].map(([node, all]) => [node, all.map(([time]) => time)]));
    this.sums = { there: [base.there], back: [base.back], pushes: [base.pushes], pulls: [base.pulls], updates: [base.updates] };
    for (const { kind, nbytes = 0 } of script.beats) this.#count(kind, nbytes);
    this.late = picture.gradients.filter((g) => g[6] !== null).sort((a, b) => a[3] - b[3]);
    this.taken = this.late.map(([, , , until]) => until);
  }

  #count(kind, nbytes) {
    const more = { there: kind === "push" ? nbytes : 0, back: kind === "weights" ? nbytes : 0,
      pushes: kind === "push", pulls: kind === "weights", updates: kind === "update" };
    for (const [name, list] of Object.entries(this.sums)) list.push(list.at(-1) + Number(more[name]));
  }

  at(time) {
    const { picture } = this;
    const run = picture.runs[order.right(picture.runs, time) - 1] ?? -Infinity;
    const rows = picture.rows.map((_, i) => this.#row(i, time, run));
    for (const [row, worker, , , slot, version] of picture.gradients.filter(lasts(time))) rows[row].slots.push({ slot, worker, version });
    for (const [row, worker] of picture.held.filter(lasts(time))) rows[row].held.push(worker);
    const status = new Map([...this.status].map(([node, all]) => {
      const [, , kind, text, awaited] = all[order.right(this.changes.get(node), time) - 1] ?? [0, 0, "", "", []];
      return [node, { kind, text, awaited }];
    }));
    const present = new Set(picture.present.filter(([t]) => t >= run && t <= time).map(([, node]) => node));
    return { rows, status, present };
  }

  #row(i, time, run) {
    const known = this.picture.known.some(([t, row]) => row === i && t >= run && t <= time);
    const mine = this.updates.get(i) ?? [];
    const done = mine.filter(([, , begin, end]) => begin >= run && end !== null && end <= time).at(-1);
    return { version: done ? done[1] : known ? 0 : null, last: done?.[4] ?? null, slots: [], held: [], missing: this.picture.team };
  }

  // So many of everything until a time; late[n]: gradients of the n-th bin of staleness.
  counts(time) {
    const n = order.right(this.script.ends, time);
    const late = [...this.picture.base.late];
    for (const g of this.late.slice(0, order.right(this.taken, time))) late[g[6]] += 1;
    return { ...Object.fromEntries(Object.entries(this.sums).map(([name, list]) => [name, list[n]])), late };
  }

  // When each worker waits and computes: [kind, begin, end], in seconds.
  stretches(node) {
    const all = this.status.get(node) ?? [];
    const found = [];
    all.forEach(([begin, , kind], i) => {
      const [end, last] = [all[i + 1]?.[0] ?? this.picture.end, found.at(-1)];
      if (last?.[0] === kind && last[2] === begin) last[2] = end;
      else if (kind === "waits" || kind === "works") found.push([kind, begin, end]);
    });
    return found;
  }
}
