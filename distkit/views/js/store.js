// The data of one picture, which is replaced during a run. Bars and arrows are indices into arrays;
// objects are created only for visible ones.

import { workKind } from "./colors.js";
import { tensors, unpack } from "./columns.js";

export class Store {
  constructor(picture) {
    this.load(picture);
  }

  load({ columns, ...frame }) {
    const parts = unpack(columns);
    const { start, end, seq, category, collective, send, recv, sent, received } = parts;
    Object.assign(this, { frame, start, end, seq, category, collective, send, recv, sent, received });
    Object.assign(this, { categories: columns.categories, count: start.length, arrows: send.length,
      values: tensors(parts), open: new Set(), special: new Set(), ids: null, groups: null, order: null });
    [this.track, this.out, this.into] =
      [0, -1, -1].map((none) => new Int32Array(this.count).fill(none));
    let at = 0;
    this.tracks = columns.tracks.map(([rank, mark, row, length], t) => {
      const items = Int32Array.from({ length }, (_, i) => at + i);
      this.track.fill(t, at, at += length);
      return { rank, mark: Boolean(mark), row, items };
    });
    for (let a = 0; a < this.arrows; a++) {
      if (send[a] >= 0) this.out[send[a]] = a;
      if (recv[a] >= 0) this.into[recv[a]] = a;
    }
    for (let i = 0; i < this.count; i++) this.#register(i);
    this.laneOf = new Map(frame.lanes.map((lane, i) => [lane.rank, i]));
    this.waits = frame.live ? null : waitsByBar(parts); // known once the run has ended
  }

  // Registers open operations, failures, and buffers used too early, which are drawn individually.
  #register(i) {
    const { kind, state, op } = this.categories[this.category[i]];
    if (Number.isNaN(this.end[i]) && kind !== "mark") this.open.add(i);
    if (state === "failed" || op === "touch") this.special.add(i);
  }

  // -- as objects -------------------------------------------------------------------

  id(i) {
    return `${this.tracks[this.track[i]].rank}.${this.seq[i]}`;
  }

  find(id) {
    this.ids ??= new Map(Array.from({ length: this.count }, (_, i) => [this.id(i), i]));
    const i = this.ids.get(id);
    return i === undefined ? undefined : this.bar(i);
  }

  bar(i) {
    const { rank, row } = this.tracks[this.track[i]];
    const end = Number.isNaN(this.end[i]) ? null : this.end[i];
    return { i, id: this.id(i), rank, row, start: this.start[i], end, collective: this.collective[i],
      values: this.values.get(i), ...this.categories[this.category[i]] };
  }

  // The end of a bar; open bars end at their rank's death, or else now.
  endOf(i, now) {
    const end = this.end[i];
    return Number.isNaN(end) ? this.frame.lanes[this.lane(i)]?.died ?? now : end;
  }

  // A reply has the operation and label of its request; if one end was not recorded, its rank is the peer of the other.
  arrow(a) {
    const [send, recv] = [this.send[a], this.recv[a]].map((i) => (i < 0 ? null : this.bar(i)));
    const isRequest = send?.kind === "request";
    const described = recv?.kind === "request" ? recv : send ?? recv;
    const payload = isRequest && recv ? recv : send ?? recv;
    const time = (t) => (Number.isNaN(t) ? null : t);
    return { a, send, recv, src: send?.rank ?? recv.peer, dst: recv?.rank ?? send.peer,
      op: described.kind === "request" ? described.op : "send", nbytes: payload.nbytes, label: described.label,
      tag: described.tag, sent: time(this.sent[a]), received: time(this.received[a]) };
  }

  // The size of the messages if all have the same size, else undefined.
  get messageSize() {
    const sizes = this.categories.filter(({ kind }) => kind === "send").map(({ nbytes }) => nbytes);
    return sizes.every((size) => size === sizes[0]) ? sizes[0] : undefined;
  }

  // The color of a rank. The lanes of a comparison have color indices; otherwise, these are the lanes' indices.
  color(rank, { ranks }) {
    const lane = this.laneOf.get(rank) ?? 0;
    return ranks[(this.frame.lanes[lane]?.color ?? lane) % ranks.length];
  }

  name(rank) {
    return this.frame.lanes[this.laneOf.get(rank)]?.name ?? `rank ${rank}`;
  }

  // The name of a rank's host, if there are several hosts.
  host(rank) {
    return this.frame.lanes[this.laneOf.get(rank)]?.host;
  }

  lane(i) {
    return this.laneOf.get(this.tracks[this.track[i]].rank);
  }

  // The bars of a collective, sorted by lane.
  members(collective) {
    if (collective === undefined || collective < 0) return [];
    if (!this.groups) {
      this.groups = [];
      this.collective.forEach((n, i) => { if (n >= 0) (this.groups[n] ??= []).push(i); });
    }
    return this.groups[collective].sort((i, j) => this.lane(i) - this.lane(j));
  }

  ordered() {
    this.order ??= Int32Array.from({ length: this.count }, (_, i) => i)
      .sort((i, j) => this.start[i] - this.start[j] || i - j);
    return this.order;
  }

  kinds() {
    const kinds = new Set();
    for (const { kind, op, label, state } of this.categories) {
      kinds.add(op === "touch" ? op : kind === "mark" ? `work${workKind(label)}` : kind);
      if (state === "failed") kinds.add("failed");
    }
    for (const i of this.open) kinds.add(this.paused(i) ? "paused" : "open");
    for (let a = 0; a < this.arrows; a++) {
      const arrived = this.send[a] >= 0 && !Number.isNaN(this.received[a]);
      kinds.add(arrived ? "message" : "lost");
    }
    return kinds;
  }

  paused(i) {
    return this.open.has(i) && this.categories[this.category[i]].state === "scheduled";
  }

  // Items related to a bar or arrow, which stay bright: {bars, arrows}.
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
      for (const i of [item.i, ...this.members(item.collective)]) bars.add(i);
      add(this.out[item.i]);
      add(this.into[item.i]);
    }
    return { bars, arrows };
  }
}

export const isOpen = (bar) => bar.end === null && bar.kind !== "mark";
export const isPaused = (bar) => bar.state === "scheduled" && isOpen(bar);

// The waits by bar: [start relative to the bar's start, duration] in seconds.
function waitsByBar({ waits, since, waited }) {
  return new Map(Array.from(waits, (i, n) => [i, [since[n], waited[n]]]));
}
