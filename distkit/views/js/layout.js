// Where things are: times and lanes to pixels and back, and what lies under the pointer.

import { clamp } from "./numbers.js";

export class Layout {
  constructor(store, sizes, width, view, now, measure) {
    const { lanes } = store.frame;
    Object.assign(this, { store, sizes, width, view, now });
    this.left = lanes.length ? clamp(Math.max(...lanes.map(measure)) + 38, 84, 210) : 24;
    this.right = width - 14;
    const rows = Math.max(1, ...lanes.map((lane) => lane.rows));
    const marks = Math.max(0, ...lanes.map((lane) => lane.marks));
    const comm = Math.min(rows * (sizes.row + sizes.gap) - sizes.gap, sizes.max_rows);
    const work = marks ? Math.min(marks * (sizes.mark + sizes.gap), sizes.max_rows / 2) : 0;
    const laneHeight = 2 * sizes.pad + comm + work;
    const room = Math.min(sizes.pitch, sizes.height / lanes.length);
    const gap = clamp(room - laneHeight, sizes.min_gap, sizes.max_gap);
    const pitch = laneHeight + gap;
    this.scale = clamp(1600 / (lanes.length * pitch), Math.min(1, 14 / pitch), 1);
    this.laneHeight = laneHeight * this.scale;
    this.pitch = pitch * this.scale;
    this.pad = sizes.pad * this.scale;
    this.rowPitch = ((comm + sizes.gap) / rows) * this.scale;
    this.rowHeight = Math.max(1.5, this.rowPitch - Math.min(sizes.gap, this.rowPitch * 0.2));
    this.markPitch = marks ? (work / marks) * this.scale : 0;
    this.comm = comm * this.scale;
    this.bottom = 6 + Math.max(1, lanes.length) * this.pitch - gap * this.scale + 8;
    this.height = this.bottom + sizes.axis;
  }

  x(time) {
    const [from, to] = this.view;
    return this.left + ((time - from) / (to - from)) * (this.right - this.left);
  }

  time(x) {
    const [from, to] = this.view;
    return from + ((x - this.left) / (this.right - this.left)) * (to - from);
  }

  laneTop(lane) {
    return 6 + lane * this.pitch;
  }

  // [x, y, width, height] of a bar; an open one reaches to the right edge.
  box(bar) {
    const top = this.laneTop(this.store.laneOf.get(bar.rank)) + this.pad;
    const from = this.x(bar.start);
    const to = bar.end === null ? Math.max(this.x(this.now), from + 6) : this.x(bar.end);
    const mark = bar.kind === "mark";
    const y = mark
      ? top + this.comm + this.sizes.gap * this.scale + bar.row * this.markPitch
      : top + bar.row * this.rowPitch;
    const height = mark ? this.markPitch - 2 * this.scale : this.rowHeight;
    return [from, y, Math.max(to - from, 2.5), Math.max(1.5, height)];
  }

  // [x1, y1, x2, y2, whole]: from the sender's bar to the receiver's.
  path(arrow) {
    const { bars, laneOf } = this.store;
    const [send, recv] = [bars.get(arrow.send), bars.get(arrow.recv)];
    const down = (laneOf.get(arrow.dst) ?? 0) >= (laneOf.get(arrow.src) ?? 0);
    const edge = (bar, rank, leaves) => {
      const [, y, , height] = bar ? this.box(bar) : this.#lane(rank);
      return leaves === down ? y + height : y;
    };
    const y1 = edge(send, arrow.src, true);
    const y2 = edge(recv, arrow.dst, false);
    const whole = arrow.sent !== null && arrow.received !== null;
    if (!send) return [this.x(recv.start) + 4, y1, this.x(recv.start) + 4, y2, false];
    const x1 = this.x(arrow.sent);
    return whole ? [x1, y1, this.x(arrow.received), y2, true] : [x1, y1, x1 + 26, y2, false];
  }

  #lane(rank) {
    const lane = this.store.laneOf.get(rank) ?? 0;
    return [0, this.laneTop(lane) + this.pad, 0, this.comm];
  }

  // The bar or arrow under a point, communication before computation.
  hit(px, py) {
    const marks = [];
    for (const bar of this.store.bars.values()) {
      const [x, y, width, height] = this.box(bar);
      if (px < x - 3 || px > x + width + 3 || py < y - 1 || py > y + height + 1) continue;
      if (bar.kind !== "mark") return bar;
      marks.push(bar);
    }
    let [best, nearest] = [null, 6];
    for (const arrow of this.store.arrows.values()) {
      const distance = segmentDistance(px, py, ...this.path(arrow));
      if (distance < nearest) [best, nearest] = [arrow, distance];
    }
    return best ?? marks.at(-1) ?? null;
  }
}

function segmentDistance(px, py, x1, y1, x2, y2) {
  const [dx, dy] = [x2 - x1, y2 - y1];
  const along = clamp(((px - x1) * dx + (py - y1) * dy) / (dx * dx + dy * dy || 1), 0, 1);
  return Math.hypot(px - x1 - along * dx, py - y1 - along * dy);
}
