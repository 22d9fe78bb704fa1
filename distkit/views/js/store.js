// The data: a snapshot, and the patches that follow it while the run goes on.

export class Store {
  constructor(snapshot) {
    this.bars = new Map();
    this.arrows = new Map();
    this.ties = new Map();
    this.merge(snapshot);
  }

  merge(patch) {
    for (const bar of patch.bars) this.#put(bar);
    for (const arrow of patch.arrows) this.arrows.set(arrow.id, arrow);
    const { bars, arrows, ...frame } = patch;
    this.frame = { ...this.frame, ...frame };
    this.laneOf = new Map(this.frame.lanes.map((lane, i) => [lane.rank, i]));
  }

  #put(bar) {
    const old = this.bars.get(bar.id);
    if (old?.tie && old.tie !== bar.tie) this.ties.get(old.tie)?.delete(bar.id);
    this.bars.set(bar.id, bar);
    if (!bar.tie) return;
    if (!this.ties.has(bar.tie)) this.ties.set(bar.tie, new Set());
    this.ties.get(bar.tie).add(bar.id);
  }

  name(rank) {
    return this.frame.lanes[this.laneOf.get(rank)]?.name ?? `rank ${rank}`;
  }

  members(tie) {
    const bars = [...(this.ties.get(tie) ?? [])].map((id) => this.bars.get(id));
    return bars.sort((a, b) => this.laneOf.get(a.rank) - this.laneOf.get(b.rank));
  }

  kinds() {
    const kinds = new Set();
    for (const bar of this.bars.values()) {
      kinds.add(bar.kind);
      if (bar.state === "failed") kinds.add("failed");
      if (isOpen(bar)) kinds.add("open");
    }
    if (this.arrows.size) kinds.add("message");
    return kinds;
  }

  // Everything that belongs with one bar or arrow: the ids to leave bright.
  related(item) {
    if (!item) return null;
    if (item.src !== undefined) return new Set([item.id, item.send, item.recv]);
    const ids = new Set([item.id, ...(this.ties.get(item.tie) ?? [])]);
    for (const { id, send, recv } of this.arrows.values()) {
      if (send === item.id || recv === item.id) for (const one of [id, send, recv]) ids.add(one);
    }
    return ids;
  }
}

export const isOpen = (bar) => bar.end === null && bar.kind !== "mark";
