// The data: a snapshot, and the patches that follow it while the run goes on. Bars and arrows
// are numbers here, their facts elements of arrays; objects are made of those that are shown.

import { tensors, unpack } from "./columns.js";

const BARS = { start: Float64Array, end: Float64Array, seq: Int32Array, look: Int32Array,
  tie: Int32Array, track: Int32Array, out: Int32Array, into: Int32Array };
const ARROWS = { send: Int32Array, recv: Int32Array, sent: Float64Array, received: Float64Array };

export class Store {
  constructor(snapshot) {
    this.bars = { get: (id) => this.find(id) };
    this.reset();
    this.merge(snapshot);
  }

  reset() {
    Object.assign(this, { count: 0, room: 0, arrows: 0, space: 0, tieBase: 0, ids: null });
    Object.assign(this, { looks: [], tracks: [], open: new Set(), odd: new Set() });
    [this.values, this.ties] = [new Map(), new Map()];
    [this.lookOf, this.trackOf] = [new Map(), new Map()];
    this.version = (this.version ?? 0) + 1;
    this.causes = null; // known once the run has ended
    this.#grow(64);
    this.#stretch(64);
  }

  merge({ bars, arrows, columns, causes, ...frame }) {
    if (columns) this.#take(columns);
    for (const bar of bars) this.#put(bar);
    for (const arrow of arrows) this.#join(arrow);
    if (causes) {
      this.#index();
      this.#explain(causes, (id) => this.ids.get(id));
    }
    if (columns || bars.length || arrows.length) this.version += 1;
    this.frame = { ...this.frame, ...frame };
    this.laneOf = new Map(this.frame.lanes.map((lane, i) => [lane.rank, i]));
  }

  // -- in bulk ----------------------------------------------------------------------

  #take(columns) {
    this.reset();
    const parts = unpack(columns);
    this.looks = columns.looks;
    this.#grow(parts.start.length);
    this.#stretch(parts.send.length);
    [this.count, this.arrows] = [parts.start.length, parts.send.length];
    for (const name of ["start", "end", "seq", "look", "tie"]) this[name].set(parts[name]);
    for (const name of Object.keys(ARROWS)) this[name].set(parts[name]);
    let at = 0;
    for (const [rank, mark, row, length] of columns.tracks) {
      const items = new Int32Array(length);
      for (let i = 0; i < length; i++) items[i] = at + i;
      this.track.fill(this.tracks.length, at, at += length);
      this.trackOf.set(`${rank}/${Boolean(mark)}/${row}`, this.tracks.length);
      this.tracks.push({ rank, mark: Boolean(mark), row, items });
    }
    this.tieBase = parts.tie.reduce((a, b) => Math.max(a, b), -1) + 1;
    for (let a = 0; a < this.arrows; a++) this.#tieEnds(a);
    this.values = tensors(parts);
    for (let i = 0; i < this.count; i++) this.#note(i);
    this.#explain(parts, (place) => place);
  }

  // waits: which wait, from when after their start, and for how long [s]; the critical path: what
  // is on it, the arrows to what waited for it, and how long after its start that went on.
  #explain({ waits, since, waited, path, via }, number) {
    const bars = new Set(Array.from(path, number));
    const arrows = new Set();
    for (const i of Array.from(via, number)) {
      const [from, to] = [this.into[i], this.out[i]];
      if (from >= 0 && bars.has(this.send[from])) arrows.add(from);
      if (to >= 0 && bars.has(this.recv[to])) arrows.add(to);
    }
    const found = new Map();
    waits.forEach((place, n) => found.set(number(place), [since[n], waited[n]]));
    const after = ([from, seconds]) => from + seconds; // from the arrival on it belongs to the path
    const ends = new Map(Array.from(via, number).map((i) => [i, after(found.get(i) ?? [0, 0])]));
    this.causes = { waits: found, critical: { bars, arrows, ends } };
  }

  #grow(room) {
    this.room = Math.max(room, this.room);
    resize(this, BARS, this.room, { tie: -1, out: -1, into: -1 });
  }

  #stretch(space) {
    this.space = Math.max(space, this.space);
    resize(this, ARROWS, this.space, {});
  }

  // What must never be hidden in a crowd: failures, and what has not ended.
  #note(i) {
    const { kind, state, op } = this.looks[this.look[i]];
    if (Number.isNaN(this.end[i]) && kind !== "mark") this.open.add(i);
    else this.open.delete(i);
    if (state === "failed" || op === "touch") this.odd.add(i);
  }

  // -- one by one -------------------------------------------------------------------

  #put({ id, rank, row, start, end, tie, values, ...look }) {
    this.#index();
    const known = this.ids.get(id);
    const i = known ?? this.count++;
    if (i >= this.room) this.#grow(2 * this.room);
    this.ids.set(id, i);
    [this.start[i], this.end[i]] = [start, end ?? NaN];
    this.seq[i] = Number(id.slice(id.indexOf(".") + 1));
    this.look[i] = number(this.lookOf, this.looks, JSON.stringify(look), look);
    this.tie[i] = tie === undefined ? -1 : this.tieBase + number(this.ties, null, tie);
    if (values) this.values.set(i, values);
    if (known === undefined) this.#line(i, rank, look.kind === "mark", row);
    this.#note(i);
  }

  #line(i, rank, mark, row) {
    const made = { rank, mark, row, items: [] };
    const t = number(this.trackOf, this.tracks, `${rank}/${mark}/${row}`, made);
    const track = this.tracks[t];
    if (!Array.isArray(track.items)) track.items = [...track.items];
    const { items } = track;
    let at = items.length;
    while (at && this.start[items[at - 1]] > this.start[i]) at -= 1;
    items.splice(at, 0, i);
    this.track[i] = t;
  }

  // A bar has at most one arrow that leaves it, and one that ends there.
  #join(arrow) {
    this.#index();
    const [send, recv] = [arrow.send, arrow.recv].map((id) => this.ids.get(id) ?? -1);
    let a = send >= 0 && this.out[send] >= 0 ? this.out[send] : recv >= 0 ? this.into[recv] : -1;
    if (a < 0) a = this.arrows++;
    if (a >= this.space) this.#stretch(2 * this.space);
    if (recv >= 0 && this.into[recv] >= 0 && this.into[recv] !== a) this.recv[this.into[recv]] = -1;
    for (const [end, list] of [[this.send[a], this.out], [this.recv[a], this.into]]) {
      if (end >= 0 && list[end] === a) list[end] = -1;
    }
    [this.send[a], this.recv[a]] = [send, recv];
    [this.sent[a], this.received[a]] = [arrow.sent ?? NaN, arrow.received ?? NaN];
    this.#tieEnds(a);
  }

  #tieEnds(a) {
    if (this.send[a] >= 0) this.out[this.send[a]] = a;
    if (this.recv[a] >= 0) this.into[this.recv[a]] = a;
  }

  #index() {
    if (this.ids) return;
    this.ids = new Map();
    for (let i = 0; i < this.count; i++) this.ids.set(this.id(i), i);
  }

  // -- as objects -------------------------------------------------------------------

  id(i) {
    return `${this.tracks[this.track[i]].rank}.${this.seq[i]}`;
  }

  find(id) {
    this.#index();
    const i = this.ids.get(id);
    return i === undefined ? undefined : this.bar(i);
  }

  bar(i) {
    const { rank, row } = this.tracks[this.track[i]];
    const end = Number.isNaN(this.end[i]) ? null : this.end[i];
    return { i, id: this.id(i), rank, row, start: this.start[i], end, tie: this.tie[i],
      values: this.values.get(i), ...this.looks[this.look[i]] };
  }

  // When a bar ends; one that never did: when its rank died, else at this time.
  until(i, now) {
    const end = this.end[i];
    return Number.isNaN(end) ? this.frame.lanes[this.lane(i)]?.died ?? now : end;
  }

  // A request's answer is drawn like the request; a missing end is where the other one says.
  arrow(a) {
    const [send, recv] = [this.send[a], this.recv[a]].map((i) => (i < 0 ? null : this.bar(i)));
    const asks = send?.kind === "request";
    const about = recv?.kind === "request" ? recv : send ?? recv;
    const heavy = asks && recv ? recv : send ?? recv;
    const time = (t) => (Number.isNaN(t) ? null : t);
    return { a, send, recv, src: send?.rank ?? recv.peer, dst: recv?.rank ?? send.peer,
      op: about.kind === "request" ? about.op : "send", nbytes: heavy.nbytes, label: about.label,
      tag: about.tag, sent: time(this.sent[a]), received: time(this.received[a]) };
  }

  name(rank) {
    return this.frame.lanes[this.laneOf.get(rank)]?.name ?? `rank ${rank}`;
  }

  // Of a rank's host the name, where there are several.
  host(rank) {
    return this.frame.lanes[this.laneOf.get(rank)]?.host;
  }

  lane(i) {
    return this.laneOf.get(this.tracks[this.track[i]].rank);
  }

  // The bars of one collective, from the top lane down.
  members(tie) {
    if (tie === undefined || tie < 0) return [];
    return this.tied().get(tie);
  }

  // The bars of every collective: tied().get(tie).
  tied() {
    if (this.tiedOf?.version === this.version) return this.tiedOf;
    let most = -1;
    for (let i = 0; i < this.count; i++) most = Math.max(most, this.tie[i]);
    const first = new Int32Array(most + 2);
    for (let i = 0; i < this.count; i++) first[this.tie[i] + 1] += this.tie[i] >= 0;
    for (let t = 1; t < first.length; t++) first[t] += first[t - 1];
    const [next, list] = [first.slice(), new Int32Array(first.at(-1))];
    for (let i = 0; i < this.count; i++) if (this.tie[i] >= 0) list[next[this.tie[i]]++] = i;
    const get = (tie) => Array.from(list.subarray(first[tie], first[tie + 1]))
      .sort((i, j) => this.lane(i) - this.lane(j));
    return (this.tiedOf = { version: this.version, get });
  }

  // The bars in the order of their starts.
  ordered() {
    if (this.orderOf?.version === this.version) return this.orderOf.order;
    const order = Int32Array.from({ length: this.count }, (_, i) => i);
    order.sort((i, j) => this.start[i] - this.start[j] || i - j);
    this.orderOf = { version: this.version, order };
    return order;
  }

  kinds() {
    const kinds = new Set();
    for (const look of this.looks) {
      kinds.add(look.kind);
      if (look.state === "failed") kinds.add("failed");
      if (look.op === "touch") kinds.add("touch");
    }
    for (const i of this.open) kinds.add(this.paused(i) ? "paused" : "open");
    for (let a = 0; a < this.arrows; a++) {
      const arrived = this.send[a] >= 0 && !Number.isNaN(this.received[a]);
      kinds.add(arrived ? "message" : "lost");
    }
    return kinds;
  }

  paused(i) {
    return this.open.has(i) && this.looks[this.look[i]].state === "scheduled";
  }

  // What belongs with one bar or arrow, and stays bright: {bars, arrows}.
  related(item) {
    if (!item) return null;
    const [bars, arrows] = [new Set(), new Set()];
    const add = (a) => {
      if (a < 0 || a === undefined) return;
      arrows.add(a);
      for (const i of [this.send[a], this.recv[a]]) if (i >= 0) bars.add(i);
    };
    add(item.a);
    if (item.i !== undefined) {
      for (const i of [item.i, ...this.members(item.tie)]) bars.add(i);
      add(this.out[item.i]);
      add(this.into[item.i]);
    }
    return { bars, arrows };
  }
}

// The number of a key, a new one if it is new; its value then goes to the end of the list.
function number(numbers, list, key, value) {
  if (!numbers.has(key)) {
    numbers.set(key, list ? list.length : numbers.size);
    list?.push(value);
  }
  return numbers.get(key);
}

function resize(store, types, length, blank) {
  for (const [name, Type] of Object.entries(types)) {
    const old = store[name];
    store[name] = new Type(length).fill(blank[name] ?? 0);
    if (old && old.length <= length && store.count + store.arrows) store[name].set(old);
  }
}

export const isOpen = (bar) => bar.end === null && bar.kind !== "mark";
export const isPaused = (bar) => bar.state === "scheduled" && isOpen(bar);
