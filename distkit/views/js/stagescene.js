// Paints the stage as SVG: links, messages on their way, ranks, and the strips that they hold.

import { s } from "./dom.js";
import { clamp } from "./numbers.js";

const WIDTH = 760;
const STRIPS = 16; // so many ranks have a strip, and so many a number
const NUMBERS = 40;
const NEGATIVE = "#0072b2";
const POSITIVE = "#e08200";
const ROUND = ["ring", "star"];

const along = ([x1, y1], [x2, y2], f) => [x1 + f * (x2 - x1), y1 + f * (y2 - y1)];
const ease = (f) => f * f * (3 - 2 * f);

export class Scene {
  constructor() {
    this.layers = Object.fromEntries(["links", "flights", "nodes", "strips", "tokens"].map((name) =>
      [name, s("g", { class: `dk-${name}` })]));
    this.root = s("svg", { class: "dk-svg", "aria-hidden": "true" }, ...Object.values(this.layers));
    Object.assign(this, { ranks: [], paper: "#fff" });
  }

  look(ranks, paper) {
    Object.assign(this, { ranks, paper });
    this.heat = d3.scaleLinear().domain([-1, 0, 1]).range([NEGATIVE, paper, POSITIVE]).clamp(true);
  }

  load(picture, script) {
    Object.assign(this, { picture, script, tokens: new Map(), drawn: null });
    const n = picture.nodes.length;
    this.radius = n <= 4 ? 27 : n <= 8 ? 23 : n <= STRIPS ? 18 : n <= NUMBERS ? 13 : n <= 200 ? 6 : 3.5;
    this.strips = n <= STRIPS && picture.changes.length > 0;
    this.#place(n);
    for (const layer of Object.values(this.layers)) layer.replaceChildren();
    this.#links();
    this.nodes = new Map(picture.nodes.map((node) => [node.rank, this.#node(node)]));
    this.most = Math.max(1e-30, ...picture.changes.flatMap(({ pieces }) =>
      pieces.flatMap(({ values = [] }) => values.filter(Number.isFinite).map(Math.abs))));
  }

  // -- places -------------------------------------------------------------------------

  #place(n) {
    const { nodes, kind } = this.picture;
    const flat = n < 3 || (["roles", "hosts", "grid"].includes(kind) && new Set(nodes.map(({ y }) => y)).size < 3);
    const [aside, above] = n <= STRIPS ? [156, 104] : [40, 40];
    const levels = new Set(nodes.map(({ y }) => y)).size;
    const tree = kind === "tree" && n <= STRIPS; // strips stand to the right of the ranks
    const height = n < 2 ? 260 : n === 2 ? 280 : tree ? 110 + 118 * levels : flat ? 400 : n <= STRIPS ? 540 : 600;
    let [wide, deep] = [WIDTH - 2 * aside + (tree ? 80 : 0), height - (tree ? 120 : 2 * above)];
    if (ROUND.includes(kind) && n > 2) wide = deep = Math.min(wide + 40, deep + 24);
    this.root.setAttribute("viewBox", `0 0 ${WIDTH} ${height}`);
    this.at = new Map(nodes.map(({ rank, x, y }) =>
      [rank, [WIDTH / 2 + (x - 0.5) * wide - (tree ? 44 : 0), height / 2 + (y - 0.5) * deep]]));
  }

  #hub(members) {
    const points = members.map((rank) => this.at.get(rank)).filter(Boolean);
    return [0, 1].map((k) => points.reduce((sum, p) => sum + p[k], 0) / Math.max(points.length, 1));
  }

  // From the edge of one rank to the edge of another; a little aside when both ways are used.
  #ends(src, dst, shift = 0) {
    const [a, b] = [this.at.get(src), this.at.get(dst)];
    if (!a || !b) return null;
    const length = Math.hypot(b[0] - a[0], b[1] - a[1]) || 1;
    const [ux, uy] = [(b[0] - a[0]) / length, (b[1] - a[1]) / length];
    const gap = Math.min(this.radius + 5, length / 3);
    return [[a[0] + ux * gap - uy * shift, a[1] + uy * gap + ux * shift],
      [b[0] - ux * gap - uy * shift, b[1] - uy * gap + ux * shift]];
  }

  // The edge of a rank that looks to a point.
  #edge(rank, [hx, hy]) {
    const at = this.at.get(rank);
    if (!at) return null;
    const length = Math.hypot(hx - at[0], hy - at[1]) || 1;
    return along(at, [hx, hy], Math.min(1, (this.radius + 5) / length));
  }

  #links() {
    this.both = new Set();
    const path = [];
    for (const [a, b, there, back] of this.picture.links) {
      const ends = this.#ends(a, b);
      if (there && back) for (const key of [`${a}>${b}`, `${b}>${a}`]) this.both.add(key);
      if (ends) path.push(`M${ends[0].map((v) => v.toFixed(1))}L${ends[1].map((v) => v.toFixed(1))}`);
    }
    if (path.length) this.layers.links.append(s("path", { d: path.join(""), class: "dk-link" }));
  }

  #color(rank) {
    return `var(--dk-r${this.script.lane(rank) % 8})`;
  }

  #node({ rank, name, out }) {
    const [x, y] = this.at.get(rank);
    const r = this.radius;
    const group = s("g", { transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})` },
      s("circle", { r, fill: this.#color(rank) }));
    if (this.picture.nodes.length <= NUMBERS) {
      const label = s("text", { y: r * 0.36, "font-size": r * 1.02, fill: `var(--dk-i${this.script.lane(rank) % 8})`, class: "dk-number" });
      label.textContent = rank;
      group.append(label);
    }
    this.layers.nodes.append(group);
    const strip = s("g", {});
    this.layers.strips.append(strip);
    if (!/^rank \d+$/.test(name) && this.strips) this.#caption(group, name, out);
    return { group, strip, out, pieces: null, box: null };
  }

  #caption(group, name, [ox, oy]) {
    const up = oy < -0.5;
    const text = s("text", { class: "dk-caption", y: up ? this.radius + 19 : -this.radius - 9 });
    text.textContent = name;
    if (Math.abs(ox) < 2) group.append(text);
  }

  // -- strips ------------------------------------------------------------------------------

  #box(rank, pieces) {
    const [x, y] = this.at.get(rank);
    const [ox, oy] = this.nodes.get(rank).out;
    const height = this.picture.nodes.length > 4 ? 40 : 46;
    const width = clamp(26 * pieces.length, 64, 112);
    const reach = this.radius + 11 + Math.abs(ox) * width / 2 + Math.abs(oy) * height / 2;
    return [x + ox * reach - width / 2, y + oy * reach - height / 2, width, height];
  }

  #cell(rank, i) {
    const { box, pieces } = this.nodes.get(rank);
    const each = box[2] / pieces.length;
    return [box[0] + i * each + 1, box[1], Math.max(each - 2, 1), box[3]];
  }

  #strip(rank, pieces, fresh) {
    const node = this.nodes.get(rank);
    if (!node || !this.strips) return;
    Object.assign(node, { pieces, box: this.#box(rank, pieces) });
    node.strip.replaceChildren(...pieces.map((piece, i) => this.#piece(piece, this.#cell(rank, i), fresh === i)));
  }

  // A chunk: a layer for each contributor, or its values.
  #piece(piece, [x, y, w, h], fresh = false) {
    const group = s("g", { transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})` },
      s("rect", { width: w.toFixed(1), height: h, rx: 2, class: "dk-track" }));
    if (this.mode === "values") group.append(...this.#values(piece.values ?? [], w, h));
    else group.append(...this.#contributors(piece, w, h));
    if (fresh) group.append(s("rect", { x: -1.5, y: -1.5, width: w + 3, height: h + 3, rx: 3.5, class: "dk-fresh" }));
    return group;
  }

  #contributors({ sure = [], maybe = [] }, w, h) {
    const each = h / this.picture.nodes.length;
    const layer = (rank, kind) => s("rect", { y: (this.script.lane(rank) * each).toFixed(2), width: w.toFixed(1),
      height: each.toFixed(2), class: kind, fill: this.#color(rank) });
    return [...sure.map((rank) => layer(rank, "dk-sure")), ...maybe.map((rank) => layer(rank, "dk-maybe"))];
  }

  #values(values, w, h) {
    const each = w / Math.max(values.length, 1);
    return values.map((v, i) => s("rect", { x: (i * each).toFixed(2), width: (each + 0.15).toFixed(2), height: h,
      ...(Number.isFinite(v) ? { fill: this.heat(v / this.most) } : { class: "dk-odd" }) }));
  }

  // -- a moment ---------------------------------------------------------------------------------

  // anew: colours or mode have changed; resting: the beat that has just ended, -1 for none.
  draw(time, { anew = false, resting = -1 } = {}) {
    this.#hold(time, anew, resting);
    const flying = new Set();
    this.layers.flights.replaceChildren();
    const way = this.script.underWay(time).slice(0, 200);
    for (const i of way) this.#fly(i, time, flying);
    if (resting >= 0 && !way.includes(resting)) this.#rest(resting);
    for (const [key, token] of this.tokens) {
      if (!flying.has(key)) {
        token.remove();
        this.tokens.delete(key);
      }
    }
  }

  #hold(time, anew, resting) {
    const { changes, beats } = this.script;
    const held = new Map();
    if (anew || this.drawn === null || time < this.drawn) {
      this.next = 0;
      for (const [rank, { pieces }] of this.nodes) if (pieces) held.set(rank, null);
      for (const node of this.nodes.values()) node.pieces = null;
    }
    this.drawn = time;
    for (; this.next < changes.length && changes[this.next].time <= time; this.next++) {
      const { rank, at, pieces } = changes[this.next];
      const old = held.get(rank) ?? this.nodes.get(rank)?.pieces;
      if (at === undefined) held.set(rank, pieces);
      else if (old) held.set(rank, old.with(at, pieces[0]));
    }
    const beat = beats[resting];
    const fresh = beat && !beat.members && beat.end !== null ? beat.dst : null;
    for (const rank of [this.fresh, fresh]) { // the outline of what has just come
      const pieces = this.nodes.get(rank)?.pieces;
      if (this.fresh !== fresh && pieces && !held.has(rank)) held.set(rank, pieces);
    }
    this.fresh = fresh;
    for (const [rank, pieces] of held) {
      if (pieces) this.#strip(rank, pieces, rank === fresh ? beat.at ?? 0 : -1);
      else this.nodes.get(rank)?.strip.replaceChildren();
    }
  }

  #path(points, color, more = "") {
    const d = points.map((p, i) => `${i ? "L" : "M"}${p.map((v) => v.toFixed(1))}`).join("");
    this.layers.flights.append(s("path", { d, class: `dk-flight ${more}`, stroke: color }));
  }

  #arrow(ends, color) {
    const [a, b] = ends;
    const angle = (Math.atan2(b[1] - a[1], b[0] - a[0]) * 180) / Math.PI;
    this.layers.flights.append(s("path", { d: "M0 0L-11 5L-11 -5z", fill: color,
      transform: `translate(${b[0].toFixed(1)} ${b[1].toFixed(1)}) rotate(${angle.toFixed(1)})` }));
  }

  #aside({ src, dst }) {
    return this.both.has(`${src}>${dst}`) ? 7 : 0;
  }

  #rest(i) {
    const beat = this.script.beats[i];
    if (beat.members) {
      const hub = this.#hub(beat.members);
      for (const rank of beat.members) if (this.at.has(rank)) this.#path([this.#edge(rank, hub), hub], this.#color(rank), "dk-past");
      return;
    }
    const ends = this.#ends(beat.src, beat.dst, this.#aside(beat));
    if (!ends) return;
    const color = beat.end === null ? "var(--dk-warning)" : this.#color(beat.src);
    this.#path(ends, color, beat.end === null ? "dk-lost" : "");
    this.#arrow(ends, color);
  }

  #fly(i, time, flying) {
    const beat = this.script.beats[i];
    if (beat.members) return this.#meet(i, beat, time, flying);
    const ends = this.#ends(beat.src, beat.dst, this.#aside(beat));
    if (!ends) return;
    const lost = beat.end === null;
    this.#path(ends, lost ? "var(--dk-warning)" : this.#color(beat.src), lost ? "dk-lost" : "");
    if (!beat.sent) return;
    const f = lost ? 0.5 : ease(clamp((time - beat.begin) / Math.max(beat.end - beat.begin, 1e-12), 0, 1));
    this.#token(`${i}`, beat.src, beat.piece, along(...ends, f), flying);
  }

  // A collective: every member to the hub, and back from there with the outcome.
  #meet(i, { members, starts, ends, meet, root, gives, op }, time, flying) {
    const hub = this.#hub(members);
    this.layers.flights.append(s("circle", { cx: hub[0], cy: hub[1], r: 5, class: "dk-hub" }));
    members.forEach((rank, k) => {
      const home = this.#edge(rank, hub);
      if (!home || time < starts[k]) return;
      const rooted = root !== null && root !== undefined;
      const goes = !rooted || rank === root || !gives || op === "reduce";
      const comes = !rooted || (gives ? rank !== root : rank === root);
      const there = time < meet;
      if (there ? !goes : !comes || (ends[k] !== null && time > ends[k])) return;
      const end = ends[k] ?? Infinity;
      const f = there ? (time - starts[k]) / Math.max(meet - starts[k], 1e-12)
        : Number.isFinite(end) ? 1 - (time - meet) / Math.max(end - meet, 1e-12) : 1;
      this.#path([home, hub], this.#color(rank));
      this.#token(`${i}.${rank}`, rank, null, along(home, hub, ease(clamp(f, 0, 1)) * 0.94), flying);
    });
  }

  #token(key, rank, piece, [x, y], flying) {
    flying.add(key);
    let token = this.tokens.get(key);
    if (!token || token.mode !== this.mode) {
      token?.remove();
      token = this.#parcel(rank, piece);
      token.mode = this.mode;
      this.tokens.set(key, token);
      this.layers.tokens.append(token);
    }
    token.setAttribute("transform", `translate(${x.toFixed(1)} ${y.toFixed(1)})`);
  }

  // What flies: the chunk itself where there is room, else a dot in the sender's colour.
  #parcel(rank, piece) {
    const shown = piece && (this.mode === "values" ? piece.values : piece.sure?.length || piece.maybe?.length);
    if (!shown || !this.strips) {
      return s("g", { class: "dk-token" }, s("circle", { r: Math.min(8, this.radius * 0.8), fill: this.#color(rank) }));
    }
    const [w, h] = [24, 34];
    return s("g", { class: "dk-token" },
      s("rect", { x: -w / 2 - 3, y: -h / 2 - 3, width: w + 6, height: h + 6, rx: 5, class: "dk-parcel" }),
      this.#piece(piece, [-w / 2, -h / 2, w, h]));
  }
}
