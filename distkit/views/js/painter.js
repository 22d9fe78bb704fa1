// Draws the picture on a canvas. Needs a 2D context, a layout and a look; touches no DOM.

import { humanBytes, roundStep, timeUnit } from "./numbers.js";
import { isOpen } from "./store.js";

export class Painter {
  // look: fg, muted, bg, lane, grid, font, ranks (colours), warning, dark
  constructor(context, layout, look, focus) {
    Object.assign(this, { c: context, at: layout, look, focus, store: layout.store });
    this.bright = this.store.related(focus);
    this.labels = [];
  }

  draw() {
    const { c, at } = this;
    c.clearRect(0, 0, at.width, at.height);
    this.#lanes();
    if (!this.store.bars.size) return;
    this.#axis();
    c.save();
    c.beginPath();
    c.rect(at.left - 4, 0, at.right - at.left + 8, at.bottom);
    c.clip();
    const bars = this.#visibleBars();
    for (const bar of bars) if (bar.kind === "mark") this.#mark(bar);
    for (const tie of new Set(bars.map((bar) => bar.tie))) if (tie) this.#ribbon(tie);
    const arrows = this.#visibleArrows();
    for (const [arrow, path] of arrows) this.#shaft(arrow, path);
    for (const bar of bars) if (bar.kind !== "mark") this.#bar(bar);
    for (const [arrow, path] of arrows) this.#tip(arrow, path);
    if (arrows.length <= 120) for (const [arrow, path] of arrows) this.#weight(arrow, path);
    c.restore();
  }

  color(rank) {
    const { ranks } = this.look;
    return ranks[(this.store.laneOf.get(rank) ?? 0) % ranks.length];
  }

  #dim(...ids) {
    return !this.bright || ids.some((id) => this.bright.has(id)) ? 1 : 0.25;
  }

  // Bars in sight; of those that would cover each other's pixels only the first.
  #visibleBars() {
    const seen = new Map();
    const bars = [];
    for (const bar of this.store.bars.values()) {
      const [x, , width] = this.at.box(bar);
      if (x > this.at.right || x + width < this.at.left) continue;
      const place = `${bar.rank}/${bar.kind === "mark"}/${bar.row}`;
      if (width < 3 && x - (seen.get(place) ?? -9) < 1 && !this.bright?.has(bar.id)) continue;
      seen.set(place, x);
      bars.push(bar);
    }
    return bars;
  }

  #lanes() {
    const { c, at, look } = this;
    this.store.frame.lanes.forEach((lane, i) => {
      const [top, height] = [at.tops[i], at.heights[i]];
      const middle = top + height / 2;
      c.fillStyle = look.lane;
      roundRect(c, at.left - 4, top, at.right - at.left + 8, height, 6);
      c.fill();
      if (height < 9) return;
      c.fillStyle = this.color(lane.rank);
      roundRect(c, 2, middle - 5, 10, 10, 5);
      c.fill();
      const two = lane.detail && height + at.gap > 34;
      this.#text(lane.name, 21, middle - (two ? 7 : 0), look.fg, `600 13px ${look.font}`);
      if (two) this.#text(lane.detail, 21, middle + 9, look.muted, `12px ${look.font}`);
    });
  }

  #text(text, x, y, color, font, align = "left") {
    Object.assign(this.c, { fillStyle: color, font, textAlign: align, textBaseline: "middle" });
    this.c.fillText(text, x, y + 0.5);
  }

  #axis() {
    const { c, at, look } = this;
    const zero = this.store.frame.start ?? 0;
    const [from, to] = at.view.map((time) => time - zero);
    const step = roundStep(to - from, (at.right - at.left) / 105);
    const [scale, unit] = timeUnit(Math.max(Math.abs(from), Math.abs(to)) * 0.999);
    const digits = Math.max(0, -Math.floor(Math.log10(step * scale) + 1e-9));
    const font = `12px ${look.font}`;
    for (let n = Math.ceil(from / step - 1e-9); n * step <= to; n++) {
      const x = Math.round(at.x(zero + n * step)) + 0.5;
      this.#line(x, 0, x, at.bottom, look.grid, 1);
      const label = n === 0 ? "0" : `${(n * step * scale).toFixed(digits)} ${unit}`;
      if (x < at.right - 10) this.#text(label, x, at.bottom + 14, look.muted, font, "center");
    }
    this.#line(at.left - 4, at.bottom + 0.5, at.right + 4, at.bottom + 0.5, look.hairline, 1);
  }

  #line(x1, y1, x2, y2, color, width, dash = []) {
    const { c } = this;
    Object.assign(c, { strokeStyle: color, lineWidth: width });
    c.setLineDash(dash);
    c.beginPath();
    c.moveTo(x1, y1);
    c.lineTo(x2, y2);
    c.stroke();
    c.setLineDash([]);
  }

  #mark(bar) {
    const { c, at, look } = this;
    const [x, y, width, height] = at.box(bar);
    c.globalAlpha = this.#dim(bar.id);
    c.fillStyle = bar.state === "failed" ? this.#hatch(look.warning) : look.mark;
    roundRect(c, x, y, width, height, 3);
    c.fill();
    if (height >= 11) this.#label([bar.label], x, y, width, height, look.soft, 11.5);
    c.globalAlpha = 1;
  }

  #bar(bar) {
    const { c, at, look } = this;
    const [x, y, width, height] = at.box(bar);
    const [open, failed] = [isOpen(bar), bar.state === "failed"];
    const color = failed ? look.warning : this.color(bar.rank);
    const solid = !open && !failed && (bar.kind === "send" || bar.kind === "collective");
    c.globalAlpha = this.#dim(bar.id);
    roundRect(c, x, y, width, height, bar.kind === "request" ? height / 2 : 3.5);
    c.fillStyle = look.bg;
    c.fill();
    c.fillStyle = failed ? this.#hatch(color) : open ? this.#fade(color, x, width) : solid ? color
      : alpha(color, bar.kind === "request" ? 0.42 : 0.18);
    c.fill();
    if (!solid && width > 4) this.#outline(x, y, width, height, color, open, bar.kind);
    if (!solid && width <= 4) c.fillStyle = color, c.fill();
    const stuck = open && !this.store.frame.live;
    const ink = solid ? readable(color) : stuck ? look.warning : look.fg;
    if (height >= 12) this.#label(this.#words(bar), x, y, width, height, ink, 12);
    if (bar === this.focus) this.#ring(x, y, width, height);
    c.globalAlpha = 1;
  }

  #outline(x, y, width, height, color, open, kind) {
    const { c } = this;
    c.save();
    if (open) {  // no right edge: it has not ended
      c.beginPath();
      c.rect(x - 2, y - 2, width, height + 4);
      c.clip();
    }
    const radius = kind === "request" ? height / 2 : 3;
    roundRect(c, x + 0.75, y + 0.75, width - 1.5, height - 1.5, radius);
    Object.assign(c, { strokeStyle: color, lineWidth: 1.5 });
    c.setLineDash(open ? [5, 3] : []);
    c.stroke();
    c.restore();
  }

  #ring(x, y, width, height) {
    roundRect(this.c, x - 2.5, y - 2.5, width + 5, height + 5, 6);
    Object.assign(this.c, { strokeStyle: this.look.fg, lineWidth: 1.5 });
    this.c.stroke();
  }

  #words(bar) {
    const peer = bar.peer === undefined ? "" : this.store.name(bar.peer);
    if (bar.state === "failed") return [`✕ ${bar.op} failed`, `✕ ${bar.op}`, "✕"];
    if (isOpen(bar)) {
      const still = this.store.frame.live ? bar.op : `still in ${bar.op}`;
      return peer && bar.kind === "recv" ? [`${still} from ${peer}`, still, bar.op] : [still, bar.op];
    }
    if (bar.kind === "send") return [`send to ${peer}`, "send"];
    if (bar.kind === "recv") return [`recv from ${peer}`, "recv"];
    if (bar.kind === "request") return [`${bar.op} ${bar.label ?? ""}`, bar.op];
    return bar.nbytes ? [`${bar.op} ${humanBytes(bar.nbytes)}`, bar.op] : [bar.op];
  }

  // The longest of some texts that fits into the visible part of a box, or none.
  #label(texts, x, y, width, height, color, size) {
    const { c, at } = this;
    const from = Math.max(x, at.left) + 5;
    const room = Math.min(x + width, at.right) - from - 3;
    if (room < 8) return;
    c.font = `500 ${size}px ${this.look.font}`;
    const text = texts.find((t) => t && c.measureText(t).width <= room);
    if (text) this.#text(text, from, y + height / 2, color, c.font);
  }

  // A faint band through the members of one collective, lane by lane.
  #ribbon(tie) {
    const { c, at, look } = this;
    const members = this.store.members(tie);
    const mixed = new Set(members.map((bar) => bar.op)).size > 1;
    const color = mixed ? look.warning : look.fg;
    const dim = this.#dim(...members.map((bar) => bar.id));
    for (let i = 1; i < members.length; i++) {
      const [x1, y1, w1, h1] = at.box(members[i - 1]);
      const [x2, y2, w2] = at.box(members[i]);
      const middle = (y1 + h1 + y2) / 2;
      const side = (from, to, y, end) => c.bezierCurveTo(from, middle, to, middle, to, end);
      c.beginPath();
      c.moveTo(x1, y1 + h1);
      side(x1, x2, y1 + h1, y2);
      c.lineTo(x2 + w2, y2);
      side(x2 + w2, x1 + w1, y2, y1 + h1);
      c.closePath();
      c.globalAlpha = dim;
      c.fillStyle = alpha(color, this.bright && dim === 1 ? 0.15 : mixed ? 0.16 : 0.085);
      c.fill();
      Object.assign(c, { strokeStyle: alpha(color, 0.22), lineWidth: 0.75 });
      if (Math.min(w1, w2) > 4) c.stroke();
    }
    c.globalAlpha = 1;
  }

  #visibleArrows() {
    const { left, right } = this.at;
    const arrows = [...this.store.arrows.values()].map((arrow) => [arrow, this.at.path(arrow)]);
    const inSight = arrows.filter(([, [x1, , x2]]) =>
      Math.min(x1, x2) <= right && Math.max(x1, x2) >= left);
    this.many = inSight.length > 1200;
    return inSight;
  }

  // The line runs behind the bars, so that they stay legible; chosen ones run in front.
  #shaft(arrow, [x1, y1, x2, y2, whole]) {
    const { c, look, many } = this;
    const strong = this.bright?.has(arrow.id);
    c.globalAlpha = this.#dim(arrow.id) * (many && !strong ? 0.3 : 1);
    if (!many) this.#line(x1, y1, x2, y2, look.bg, 4.5);
    const [color, width] = [this.#ink(arrow, whole), strong ? 2.6 : many ? 1 : 1.7];
    this.#line(x1, y1, x2, y2, color, width, whole ? [] : [4, 4]);
    c.globalAlpha = 1;
  }

  #tip(arrow, [x1, y1, x2, y2, whole]) {
    if (this.bright?.has(arrow.id)) this.#shaft(arrow, [x1, y1, x2, y2, whole]);
    if (this.many) return;
    const length = Math.hypot(x2 - x1, y2 - y1) || 1;
    const color = this.#ink(arrow, whole);
    this.c.globalAlpha = this.#dim(arrow.id);
    if (whole) this.#head(x2, y2, (x2 - x1) / length, (y2 - y1) / length, Math.min(9, length), color);
    else this.#nowhere(arrow.send ? [x2, y2] : [x1, y1], color);
    this.c.globalAlpha = 1;
  }

  #ink(arrow, whole) {
    return whole || this.store.frame.live ? this.color(arrow.src) : this.look.warning;
  }

  #head(x, y, ux, uy, size, color) {
    const { c } = this;
    const half = size * 0.42;
    c.beginPath();
    c.moveTo(x, y);
    c.lineTo(x - ux * size - uy * half, y - uy * size + ux * half);
    c.lineTo(x - ux * size + uy * half, y - uy * size - ux * half);
    c.closePath();
    Object.assign(c, { fillStyle: color, strokeStyle: this.look.bg, lineWidth: 1 });
    c.stroke();
    c.fill();
  }

  #nowhere([x, y], color) {
    const { c } = this;
    c.beginPath();
    c.arc(x, y, 4, 0, 2 * Math.PI);
    Object.assign(c, { fillStyle: this.look.bg, strokeStyle: color, lineWidth: 1.7 });
    c.fill();
    c.stroke();
  }

  // What a message weighs, written beside its arrow where nothing else stands.
  #weight(arrow, [x1, y1, x2, y2, whole]) {
    if (!whole || !arrow.nbytes || Math.abs(y2 - y1) < 34) return;
    const { c, look } = this;
    const text = arrow.label || humanBytes(arrow.nbytes);
    c.font = `11.5px ${look.font}`;
    const width = c.measureText(text).width + 8;
    const [x, y] = [(x1 + x2) / 2 + 6, (y1 + y2) / 2];
    const free = ([a, b, w]) => x + width < a || a + w < x || Math.abs(b - y) > 16;
    if (x + width > this.at.right || !this.labels.every(free)) return;
    if (!this.#betweenLanes(y)) return;
    this.labels.push([x, y, width]);
    c.globalAlpha = this.#dim(arrow.id);
    c.fillStyle = look.bg;
    roundRect(c, x - 1, y - 8, width, 16, 4);
    c.fill();
    this.#text(text, x + 3, y, look.muted, c.font);
    c.globalAlpha = 1;
  }

  #betweenLanes(y) {
    const { tops, heights } = this.at;
    return tops.every((top, i) => y + 9 <= top || y - 9 >= top + heights[i]);
  }

  #fade(color, x, width) {
    const paint = this.c.createLinearGradient(Math.max(x, this.at.left), 0, x + width, 0);
    paint.addColorStop(0, alpha(color, 0.38));
    paint.addColorStop(1, alpha(color, 0.04));
    return paint;
  }

  #hatch(color) {
    const tile = new OffscreenCanvas(8, 8);
    const c = tile.getContext("2d");
    Object.assign(c, { strokeStyle: alpha(color, 0.55), lineWidth: 1.6 });
    for (const d of [-8, 0, 8]) {
      c.moveTo(d - 1, 9);
      c.lineTo(d + 9, -1);
    }
    c.stroke();
    return this.c.createPattern(tile, "repeat");
  }
}

function roundRect(c, x, y, width, height, radius) {
  c.beginPath();
  c.roundRect(x, y, width, height, Math.max(0, Math.min(radius, width / 2, height / 2)));
}

// Red, green and blue of "#rrggbb" or "rgb(…)", the two forms in which a canvas names colours.
function channels(color) {
  if (!color.startsWith("#")) return color.match(/[\d.]+/g).slice(0, 3).map(Number);
  return [1, 3, 5].map((i) => parseInt(color.slice(i, i + 2), 16));
}

export function alpha(color, a) {
  return `rgba(${channels(color).join(",")},${a})`;
}

export function brightness(color) {
  const [r, g, b] = channels(color);
  return 0.299 * r + 0.587 * g + 0.114 * b;
}

// Black or white, whichever reads better on a colour.
const readable = (color) => (brightness(color) > 125 ? "#101418" : "#ffffff");
