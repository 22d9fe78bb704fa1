// Converts times and lanes to pixels and back, and finds the item under a point.

import { clamp, rescale } from "./numbers.js";
import { d3 } from "./vendor/d3.js";

export const MIN_WIDTH = 2.5; // minimum width of a bar [px]
const GAP = 1; // space between a bar and the next [px]
const FEW_LANES_HEIGHT = 350; // maximum height of a few lanes, which must fit on a projector [px]
const HEAD = 10; // length of an arrow's head [px]
const HOST_ROW = 20; // height of a host's name above its lanes [px]
const NAME_DISTANCE = 17; // minimum distance between lanes with names [px]
export const MAX_HEIGHT = 860; // maximum visible height [px], as in timeline.css

export class Layout {
  constructor(store, sizes, width, view, now, measure) {
    const { lanes } = store.frame;
    Object.assign(this, { store, sizes, width, view, now, tops: [], lines: [], bottom: 6 });
    this.left = lanes.length ? clamp(Math.max(...lanes.map(measure)) + 38, 84, 210) : 24;
    this.right = width - 14;
    const heights = lanes.map((lane) => 2 * sizes.pad + this.#rows(lane) + this.#marks(lane));
    const lanesHeight = heights.reduce((sum, height) => sum + height, 0);
    const spare = Math.min(sizes.height, lanes.length * sizes.pitch) - lanesHeight;
    const gap = clamp(spare / Math.max(1, lanes.length), sizes.min_gap, sizes.max_gap);
    const pitches = heights.map((height) => height + gap);
    const maximum = sizes.tallest ?? clamp(34 * lanes.length, FEW_LANES_HEIGHT, 1600);
    const total = Math.min(lanesHeight + lanes.length * gap, Math.max(maximum, 14 * lanes.length));
    const minPitch = Math.min(NAME_DISTANCE, total / Math.max(1, lanes.length));
    this.scale = laneScale(pitches, total, minPitch);
    this.gap = gap * this.scale;
    this.heads = lanes.map(({ host }, i) => (host && host !== lanes[i - 1]?.host ? HOST_ROW : 0));
    this.heights = heights.map((height) => Math.max(height * this.scale, minPitch - this.gap));
    for (const [i, height] of this.heights.entries()) {
      this.bottom += this.heads[i];
      this.tops.push(this.bottom);
      this.bottom += height + this.gap;
    }
    this.bottom += lanes.length ? 10 - this.gap : 90;
    this.height = this.bottom + sizes.axis;
  }

  // y of the axis: under the lanes, or at the bottom of their visible part.
  get axis() {
    return Math.min(this.bottom, (this.foot ?? Infinity) - this.sizes.axis);
  }

  // Heights of a lane's communication, and of the marked computation below it.
  #rows({ rows }) {
    const { row, gap, max_rows } = this.sizes;
    return Math.min(Math.max(1, rows) * (row + gap) - gap, max_rows);
  }

  #marks({ marks }) {
    const { mark, gap, max_rows } = this.sizes;
    return marks ? gap + Math.min(marks * (mark + gap) - gap, max_rows / 2) : 0;
  }

  x(time) {
    return rescale(time, this.view, [this.left, this.right]);
  }

  time(x) {
    return rescale(x, [this.left, this.right], this.view);
  }

  // [x, y, width, height] of a bar; open bars extend to the right edge or their rank's death.
  box(i) {
    const { store } = this;
    const [y, height] = this.row(store.track[i]);
    const [from, to] = [this.x(store.start[i]), this.x(store.endOf(i, this.now))];
    const [gap, small] = Number.isNaN(store.end[i]) ? [0, 6] : [GAP, MIN_WIDTH];
    const minWidth = store.categories[store.category[i]].op === "touch" ? 14 : small;
    return [from, y, Math.max(to - from - gap, minWidth), height];
  }

  // [y, height] of the bars of a row.
  row(track) {
    if (this.lines[track]) return this.lines[track];
    const { rank, mark, row } = this.store.tracks[track];
    const lane = this.store.frame.lanes[this.store.laneOf.get(rank)];
    const [top, total] = mark ? this.#computation(lane) : this.#communication(lane);
    const gap = this.sizes.gap * this.scale;
    const pitch = (total + gap) / Math.max(1, mark ? lane.marks : lane.rows);
    const height = Math.max(1.5, pitch - Math.min(gap, pitch * 0.2));
    return (this.lines[track] = [top + row * pitch, height]);
  }

  // [top, height] of a lane's communication, and of its marked computation.
  #communication(lane) {
    const i = this.store.laneOf.get(lane.rank);
    const [rows, marks] = [this.#rows(lane) * this.scale, this.#marks(lane) * this.scale];
    return [this.tops[i] + (this.heights[i] - rows - marks) / 2, rows];
  }

  #computation(lane) {
    const [top, height] = this.#communication(lane);
    const gap = this.sizes.gap * this.scale;
    return [top + height + gap, this.#marks(lane) * this.scale - gap];
  }

  // [x1, y1, x2, y2, delivered] of an arrow; delivered: the message was sent and received.
  path(a) {
    const { store } = this;
    const [send, recv] = [store.send[a], store.recv[a]];
    const [src, dst] = [this.#laneOf(send, recv), this.#laneOf(recv, send)];
    const down = dst >= src;
    const y1 = this.#edge(send, src, down);
    const y2 = this.#end(recv, dst, down);
    const [sent, received] = [store.sent[a], store.received[a]];
    if (send < 0 || Number.isNaN(sent)) {
      const x = this.x(recv < 0 ? store.start[send] : store.start[recv]) + 4;
      return [x, y1, x, y2, false];
    }
    const x1 = this.x(sent);
    const arrived = !Number.isNaN(received);
    return [x1, y1, arrived ? this.x(received) : x1 + 26, y2, arrived];
  }

  // The lane of an operation or, if it is missing, of the other operation's peer.
  #laneOf(i, other) {
    const { store } = this;
    return i >= 0 ? store.lane(i) : store.laneOf.get(store.categories[store.category[other]].peer) ?? -1;
  }

  #edge(i, lane, bottom) {
    const [y, height] = i >= 0 ? this.row(this.store.track[i])
      : lane < 0 ? [0, 0] : [this.tops[lane], this.heights[lane]];
    return bottom ? y + height : y;
  }

  // y of an arrow's end: the edge of its bar. If another row hides this edge, the arrow ends inside the
  // bar or, if the bar is too narrow, at the edge of the lane's rows.
  #end(i, lane, down) {
    const y = this.#edge(i, lane, !down);
    if (i < 0) return y;
    const { row } = this.store.tracks[this.store.track[i]];
    const { rows, marks } = this.store.frame.lanes[lane];
    const hidden = down ? row > 0 : row < rows - 1 || marks > 0;
    const sign = down ? 1 : -1;
    if (hidden && this.box(i)[2] < HEAD) return this.#edge(-1, lane, !down) + sign * this.sizes.pad * this.scale;
    return y + (hidden ? sign * Math.min(HEAD, this.row(this.store.track[i])[1]) : 0);
  }

  // The range of a row's bars that are visible: the first, and one past the last.
  visibleRange({ items }) {
    const starts = d3.bisector((i) => this.store.start[i]);
    const [from, to] = this.view;
    const reach = (16 / (this.right - this.left)) * (to - from);
    return [Math.max(0, starts.left(items, from - reach) - 1), starts.left(items, to)];
  }

  // The bar or arrow under a point; communication takes precedence over computation.
  hit(px, py, arrows) {
    let mark = null;
    for (let t = 0; t < this.store.tracks.length; t++) {
      const [y, height] = this.row(t);
      if (py < y - 1 || py > y + height + 1) continue;
      const i = this.#barAt(this.store.tracks[t], px);
      if (i === null) continue;
      if (!this.store.tracks[t].mark) return this.store.bar(i);
      mark = i;
    }
    let [best, nearest] = [null, 6];
    for (const [a, path] of arrows) {
      const distance = segmentDistance(px, py, ...path);
      if (distance < nearest) [best, nearest] = [a, distance];
    }
    return best !== null ? this.store.arrow(best) : mark !== null ? this.store.bar(mark) : null;
  }

  #barAt(track, px) {
    const [first, last] = this.visibleRange(track);
    let [best, nearest] = [null, 3];
    for (let n = first; n < last; n++) {
      const [x, , width] = this.box(track.items[n]);
      const distance = Math.max(x - px, px - x - width, 0);
      if (distance < nearest) [best, nearest] = [track.items[n], distance];
      if (x > px + 3) break;
    }
    return best;
  }
}

// The scale at which the lanes have this total height, with a minimum pitch.
function laneScale(pitches, height, minimum) {
  let [remaining, available] = [pitches.reduce((sum, pitch) => sum + pitch, 0), height];
  for (const pitch of [...pitches].sort((a, b) => a - b)) {
    if (pitch * available >= minimum * remaining) break;
    [remaining, available] = [remaining - pitch, available - minimum];
  }
  return remaining > 1e-6 ? clamp(available / remaining, 0, 1) : minimum / Math.max(1, ...pitches);
}

function segmentDistance(px, py, x1, y1, x2, y2) {
  const [dx, dy] = [x2 - x1, y2 - y1];
  const along = clamp(((px - x1) * dx + (py - y1) * dy) / (dx * dx + dy * dy || 1), 0, 1);
  return Math.hypot(px - x1 - along * dx, py - y1 - along * dy);
}
