// Where things are: times and lanes to pixels and back, and what lies under the pointer.

import { clamp } from "./numbers.js";

export class Layout {
  constructor(store, sizes, width, view, now, measure) {
    const { lanes } = store.frame;
    Object.assign(this, { store, sizes, width, view, now });
    this.left = lanes.length ? clamp(Math.max(...lanes.map(measure)) + 38, 84, 210) : 24;
    this.right = width - 14;
    const heights = lanes.map((lane) => 2 * sizes.pad + this.#rows(lane) + this.#marks(lane));
    const all = heights.reduce((sum, height) => sum + height, 0);
    const room = Math.min(sizes.height, lanes.length * sizes.pitch) - all;
    const gap = clamp(room / Math.max(1, lanes.length), sizes.min_gap, sizes.max_gap);
    const tall = all + lanes.length * gap;
    this.scale = clamp(1600 / tall, Math.min(1, (14 * lanes.length) / tall), 1);
    this.gap = gap * this.scale;
    this.tops = [];
    this.bottom = 6;
    for (const height of heights) {
      this.tops.push(this.bottom);
      this.bottom += height * this.scale + this.gap;
    }
    this.heights = heights.map((height) => height * this.scale);
    this.bottom += lanes.length ? 10 - this.gap : 90;
    this.height = this.bottom + sizes.axis;
  }

  // Height of a lane's communication, and of its marked computation under it.
  #rows({ rows }) {
    const { row, gap, max_rows } = this.sizes;
    return Math.min(Math.max(1, rows) * (row + gap) - gap, max_rows);
  }

  #marks({ marks }) {
    const { mark, gap, max_rows } = this.sizes;
    return marks ? gap + Math.min(marks * (mark + gap) - gap, max_rows / 2) : 0;
  }

  x(time) {
    const [from, to] = this.view;
    return this.left + ((time - from) / (to - from)) * (this.right - this.left);
  }

  time(x) {
    const [from, to] = this.view;
    return from + ((x - this.left) / (this.right - this.left)) * (to - from);
  }

  // [x, y, width, height] of a bar; an open one reaches to the right edge.
  box(bar) {
    const lane = this.store.frame.lanes[this.store.laneOf.get(bar.rank)];
    const mark = bar.kind === "mark";
    const [top, whole] = mark ? this.#work(lane) : this.#talk(lane);
    const pitch = (whole + this.sizes.gap * this.scale) / Math.max(1, mark ? lane.marks : lane.rows);
    const height = pitch - Math.min(this.sizes.gap * this.scale, pitch * 0.2);
    const from = this.x(bar.start);
    const to = bar.end === null ? Math.max(this.x(this.now), from + 6) : this.x(bar.end);
    return [from, top + bar.row * pitch, Math.max(to - from, 2.5), Math.max(1.5, height)];
  }

  // [top, height] of the communication of a lane, and of its marked computation.
  #talk(lane) {
    const top = this.tops[this.store.laneOf.get(lane.rank)] + this.sizes.pad * this.scale;
    return [top, this.#rows(lane) * this.scale];
  }

  #work(lane) {
    const [top, height] = this.#talk(lane);
    const gap = this.sizes.gap * this.scale;
    return [top + height + gap, this.#marks(lane) * this.scale - gap];
  }

  // [x1, y1, x2, y2, whole]: from the sender's bar to the receiver's.
  path(arrow) {
    const { bars, laneOf } = this.store;
    const [send, recv] = [bars.get(arrow.send), bars.get(arrow.recv)];
    const down = (laneOf.get(arrow.dst) ?? 0) >= (laneOf.get(arrow.src) ?? 0);
    const edge = (bar, rank, leaves) => {
      const [, y, , height] = bar ? this.box(bar) : this.#empty(rank);
      return leaves === down ? y + height : y;
    };
    const y1 = edge(send, arrow.src, true);
    const y2 = edge(recv, arrow.dst, false);
    const whole = arrow.sent !== null && arrow.received !== null;
    if (!send) return [this.x(recv.start) + 4, y1, this.x(recv.start) + 4, y2, false];
    const x1 = this.x(arrow.sent);
    return whole ? [x1, y1, this.x(arrow.received), y2, true] : [x1, y1, x1 + 26, y2, false];
  }

  #empty(rank) {
    const lane = this.store.frame.lanes[this.store.laneOf.get(rank)];
    const [top, height] = lane ? this.#talk(lane) : [0, 0];
    return [0, top, 0, height];
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
