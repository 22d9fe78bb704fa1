// Where several traces are drawn: each in a panel of its own, or all in one, a thin row per trace.

import { h } from "./dom.js";
import { Layout } from "./layout.js";
import { clamp } from "./numbers.js";
import { cursor, emptiness, whereabouts } from "./overlay.js";
import { alpha } from "./colors.js";
import { Arrows } from "./arrows.js";
import { fit, roundRect } from "./canvas.js";
import { Painter } from "./painter.js";
import { strip } from "./comparestrips.js";

const [ROW, HIGHEST] = [15, 30]; // pixels of a trace's row in a shared lane, when there is room
const [ROOMY, TALL] = [340, 1500]; // all lanes of a shared panel together, and at most

// The clock of all traces: seconds since each one's start, or parts of each one's duration.
export class Clock {
  constructor(stores, kind) {
    Object.assign(this, { stores, kind });
  }

  span(n) {
    const { start, end } = this.stores[n].frame;
    return Math.max((end ?? 0) - (start ?? 0), 1e-9);
  }

  #scale(n) {
    return this.kind === "duration" ? this.span(n) : 1;
  }

  // From this clock to the trace's own, and back.
  to(n, u) {
    return (this.stores[n].frame.start ?? 0) + u * this.#scale(n);
  }

  from(n, time) {
    return (time - (this.stores[n].frame.start ?? 0)) / this.#scale(n);
  }

  get all() {
    const ends = this.stores.map(({ frame }, n) => this.from(n, frame.end ?? 0));
    const last = Math.max(...ends, 1e-6);
    return [-0.012 * last, 1.03 * last];
  }
}

// The operations of a trace: the place of each among those of its rank, computation counted for
// itself, and its counterpart in another trace, which does the same with the same peer as often.
export class Order {
  constructor(store) {
    this.store = store;
    this.version = store.version;
    const lane = (i) => store.tracks[store.track[i]];
    this.place = this.#numbers((i) => `${lane(i).rank}/${lane(i).mark}`).numbers;
    this.alike = this.#numbers((i) => this.#kind(lane(i).rank, store.looks[store.look[i]]));
  }

  #kind(rank, { op, peer, label }) {
    return `${rank}/${op}/${peer ?? ""}/${op === "mark" ? label : ""}`;
  }

  // The operations by a key, in their order; numbers: of each among those of its key.
  #numbers(keyOf) {
    const { store } = this;
    const keys = Array.from({ length: store.count }, (_, i) => keyOf(i));
    const lists = new Map(keys.map((key) => [key, []]));
    keys.forEach((key, i) => lists.get(key).push(i));
    const numbers = new Int32Array(store.count);
    for (const list of lists.values()) {
      list.sort((i, j) => store.seq[i] - store.seq[j]).forEach((i, n) => { numbers[i] = n; });
    }
    return { keys, lists, numbers };
  }

  // The same one of another trace, -1 if there is none.
  counterpart(other, i) {
    const { keys, numbers } = this.alike;
    return other.alike.lists.get(keys[i])?.[numbers[i]] ?? -1;
  }
}

// One canvas; scene: what all panels have in common, as compare.js makes it.
export class Panel {
  // numbers: of the traces that are drawn here.
  constructor(numbers, label) {
    this.numbers = numbers;
    this.canvas = h("canvas", { tabindex: 0, role: "application",
      "aria-roledescription": "timeline", "aria-label": label });
    this.context = this.canvas.getContext("2d");
    this.stage = h("div", { class: "dk-stage dkc-stage" }, this.canvas);
    this.layouts = new Map();
  }

  draw(scene) {
    const width = this.stage.clientWidth;
    const several = this.numbers.length > 1;
    this.layouts = new Map(this.numbers.map((n) => [n, this.#layout(scene, n, width)]));
    fit(this.canvas, width, this.at.height);
    if (several) this.#together(scene);
    else this.#alone(scene, this.numbers[0]);
    for (const n of this.numbers) this.#end(scene, n);
    const [at, n] = [this.at, this.numbers[0]];
    const shown = { context: this.context, layout: at, look: scene.look, store: scene.stores[n] };
    if (scene.pointer !== null) {
      cursor({ ...shown, pointer: [at.x(scene.clock.to(n, scene.pointer)), 0] });
    }
    if (scene.zoomed) whereabouts(shown, scene.view, scene.clock.all);
    if (!this.numbers.some((one) => scene.stores[one].count)) emptiness(shown);
  }

  get at() {
    return this.layouts.get(this.numbers[0]);
  }

  #layout({ stores, clock, view, sizes: { axis, ...sizes }, rooms, left, rows }, n, width) {
    const several = this.numbers.length > 1;
    const last = n === stores.length - 1 || clock.kind === "duration" || several;
    sizes.axis = last ? axis : 0; // one for all that have the same time
    sizes.height = sizes.tallest = rooms[n];
    const own = view.map((u) => clock.to(n, u));
    const { live, end } = stores[n].frame;
    const now = Math.max(own[1], end ?? 0);
    const layout = several ? new Slim(stores[n], sizes, width, own, now, rows[n])
      : new Layout(stores[n], sizes, width, own, live ? end : now, () => 0);
    const whole = several && clock.kind === "duration" ? clock.span(n) : 0;
    return Object.assign(layout, { left, whole });
  }

  #painter({ look, focus, lights, ranks }, n) {
    const own = { ...look, lanes: ranks, calm: true };
    return new Painter(this.context, this.layouts.get(n), own, focus[n], { light: lights[n] });
  }

  #alone(scene, n) {
    const painter = this.#painter(scene, n);
    painter.draw();
    Object.assign(this, { arrows: painter.arrows, many: painter.many });
  }

  #together(scene) {
    const { context: c, at } = this;
    c.clearRect(0, 0, at.width, at.height);
    lanes(c, at, scene);
    const painters = this.numbers.map((n) => this.#painter(scene, n));
    painters[0].grid();
    for (const n of this.numbers) if (scene.stores[n].count) this.#strips(scene, n, painters[n]);
    painters[0].axis();
    Object.assign(this, { arrows: [], many: false });
  }

  // The ranks of a trace, and what the chosen operation has to do with.
  #strips({ look, rows, overs, color }, n, painter) {
    const { context: c } = this;
    const [at, { bright: light, focus }] = [this.layouts.get(n), painter];
    [...rows[n].keys()].forEach((rank, lane) => {
      const looks = { color: color(lane), look, over: overs[n].get(rank), light };
      strip(c, at, rank, rows[n].get(rank), looks);
    });
    const arrows = new Arrows(painter, true);
    arrows.behind();
    arrows.before();
    if (focus?.i === undefined) return;
    const [x, y, width, height] = at.box(focus.i);
    roundRect(c, x - 1.5, y - 1.5, width + 3, height + 3, 4);
    Object.assign(c, { strokeStyle: look.fg, lineWidth: 1.5 });
    c.stroke();
  }

  // Where a trace ends: a line, and paler what is behind it.
  #end({ stores, look, trace }, n) {
    const { frame, count } = stores[n];
    const [{ context: c }, layout] = [this, this.layouts.get(n)];
    const x = layout.x(frame.end);
    if (!count || frame.live || x < layout.left || x > layout.right - 3) return;
    const spans = layout.rows instanceof Map ? [...layout.rows.values()] : [[0, layout.bottom]];
    for (const [top, height] of spans) {
      c.fillStyle = alpha(look.bg, 0.55);
      c.fillRect(x, top, layout.right + 4 - x, height);
      c.fillStyle = trace(n);
      c.fillRect(x, top, 2, height);
    }
  }

  // What is under a point: [number of the trace, bar or arrow], or null.
  hit(x, y) {
    for (const [n, layout] of this.layouts) {
      const found = layout.store.count ? layout.hit(x, y, this.arrows ?? []) : null;
      if (found) return [n, found];
    }
    return null;
  }
}

// A lane that several traces share: their rows one under the other.
class Slim extends Layout {
  // rows: from each rank to [top, height] of this trace's row.
  constructor(store, sizes, width, view, now, rows) {
    super(store, sizes, width, view, now, () => 0);
    this.rows = rows;
    this.bottom = rows.bottom;
    this.height = rows.bottom + sizes.axis;
  }

  line(track) {
    if (this.lines[track]) return this.lines[track];
    const { rank, mark, row } = this.store.tracks[track];
    const lane = this.store.frame.lanes[this.store.laneOf.get(rank)];
    const [top, height] = this.rows.get(rank);
    const pitch = height / Math.max(1, mark ? 1 : lane.rows);
    return (this.lines[track] = [mark ? top : top + row * pitch, pitch]);
  }
}

// Of each trace: from rank to [top, height], and where the lanes end.
export function shared(stores) {
  const lanes = stores.flatMap((store) => store.frame.lanes);
  const ranks = [...new Set(lanes.map((lane) => lane.rank))].sort((a, b) => a - b);
  const gap = ranks.length > 24 ? 4 : 12;
  const high = (tall) => (tall / Math.max(1, ranks.length) - gap) / stores.length - 2;
  const row = clamp(high(TALL), 3, clamp(high(ROOMY), ROW, HIGHEST));
  const tall = stores.length * (row + 2) + gap;
  const place = (i, n) => [4 + i * tall + n * (row + 2), row];
  const found = stores.map((_, n) => new Map(ranks.map((rank, i) => [rank, place(i, n)])));
  for (const rows of found) rows.bottom = 4 + ranks.length * tall + (ranks.length ? 0 : 80);
  return found;
}

function lanes(c, at, { stores, look, names, rows, trace, color }) {
  const ranks = [...rows[0].keys()];
  Object.assign(c, { textBaseline: "middle" });
  ranks.forEach((rank, i) => {
    const [[top], [last, height]] = [rows[0].get(rank), rows.at(-1).get(rank)];
    const middle = (top + last + height) / 2;
    if (last + height - top > 9) {
      c.fillStyle = color(i);
      roundRect(c, 2, middle - 5, 10, 10, 5);
      c.fill();
      Object.assign(c, { fillStyle: look.fg, font: `600 13px ${look.font}`, textAlign: "left" });
      c.fillText(names.ranks.get(rank), 21, middle + 0.5);
    }
    stores.forEach((_, n) => {
      const [y] = rows[n].get(rank);
      c.fillStyle = look.lane;
      roundRect(c, at.left - 4, y, at.right - at.left + 8, height, 3);
      c.fill();
      c.fillStyle = trace(n);
      c.fillRect(at.left - 9, y, 3, height);
      if (height < 10) return;
      Object.assign(c, { fillStyle: look.muted, font: `11px ${look.font}`, textAlign: "right" });
      c.fillText(names.traces[n], at.left - 14, y + height / 2 + 0.5);
    });
  });
}
