// Draws the picture on a canvas, without using the DOM.

import { clamp, humanBytes, roundStep, timeUnit } from "./numbers.js";
import { isOpen, isPaused } from "./store.js";
import { alpha, readable, workKind } from "./colors.js";
import { Arrows } from "./arrows.js";
import { roundRect } from "./canvas.js";
import { FILL, Strips } from "./strips.js";

export class Renderer {
  // style: the result of styleOf(); highlighted: {bars, arrows}, or null; waits: [start, seconds] by
  // bar, or null.
  constructor(context, layout, style, focus, { highlighted = null, waits = null } = {}) {
    Object.assign(this, { c: context, at: layout, style, focus, waits, store: layout.store });
    this.bright = highlighted ?? this.store.related(focus);
  }

  draw() {
    const { c, at } = this;
    c.clearRect(0, 0, at.width, at.height);
    this.#lanes();
    this.arrows = [];
    if (!this.store.count) return;
    this.grid();
    this.rows();
    this.#deaths();
    this.axis();
  }

  rows() {
    const { c, at } = this;
    c.save();
    c.beginPath();
    c.rect(at.left - 4, 0, at.right - at.left + 8, at.bottom);
    c.clip();
    const strips = new Strips(this);
    const { bars, thin } = strips.classify();
    this.summed = strips.sums.some(({ dense }) => dense);
    strips.draw(true);
    this.#ribbons(bars);
    const arrows = new Arrows(this);
    Object.assign(this, { arrows: arrows.list, many: arrows.many, labels: [] });
    for (const bar of bars) if (bar.kind === "mark") this.#mark(bar);
    strips.draw(false);
    for (const i of thin) this.#thin(i);
    for (const bar of bars) if (bar.kind !== "mark") this.#bar(bar);
    for (const one of arrows.list) arrows.shaft(...one);
    for (const label of this.#fitting()) this.#label(label);
    c.globalAlpha = 1;
    arrows.drawHeads();
    c.restore();
  }

  color(rank) {
    return this.store.color(rank, this.style);
  }

  #dim(...bars) {
    return !this.bright || bars.some((i) => this.bright.bars.has(i)) ? 1 : 0.25;
  }

  #lanes() {
    const { c, at, style } = this;
    this.store.frame.lanes.forEach((lane, i) => {
      const [top, height] = [at.tops[i], at.heights[i]];
      const middle = top + height / 2;
      if (at.heads[i]) this.#host(lane, top - at.heads[i] / 2);
      roundRect(c, at.left - 4, top, at.right - at.left + 8, height, 6);
      this.#fill(style.lane);
      if (lane.run !== undefined) this.#run(lane, top, height, at.heads[i]);
      if (height < 9) return;
      roundRect(c, 2, middle - 5, 10, 10, 5);
      this.#fill(this.color(lane.rank));
      const showsDetail = lane.detail && height + at.gap > 34;
      this.text(lane.name, 21, middle - (showsDetail ? 7 : 0), style.fg, `600 13px ${style.font}`);
      if (showsDetail) this.text(lane.detail, 21, middle + 9, style.muted, `12px ${style.font}`);
    });
  }

  // Draws the end of a lane's run as a line in the run's color, labeled "end" if there is space.
  #run({ run, end }, top, height, head) {
    const [{ c, at, style }, x] = [this, this.at.x(end)];
    if (x <= at.left || x >= at.right) return;
    if (head && x > this.headingEnd + 14) this.text("end", x + 1, top - head / 2, style.muted, `600 11px ${style.font}`, "center");
    c.fillStyle = style.traces[run % style.traces.length];
    c.fillRect(x, top, 2, height);
  }

  // Draws the name of a host, or the name and color of a run, and a line above its lanes.
  #host({ host, run }, y) {
    const { c, at, style } = this;
    this.text(host, 2, y, style.muted, `600 12px ${style.font}`);
    const x = 12 + c.measureText(host).width;
    this.headingEnd = x + 18 * (run !== undefined);
    this.line(this.headingEnd, y, at.right + 4, y, style.grid, 1);
    if (run !== undefined) this.text("■", x, y, style.traces[run % style.traces.length], `16px ${style.font}`);
  }

  // Draws a cross and the text "died" at each rank's death.
  #deaths() {
    const { at, style } = this;
    this.store.frame.lanes.forEach(({ died }, i) => {
      if (died === undefined || died < at.view[0] || died > at.view[1]) return;
      const [x, y] = [at.x(died), at.tops[i] + at.heights[i] / 2];
      for (const rise of [-5, 5]) this.line(x - 5, y - rise, x + 5, y + rise, style.warning, 2.4);
      const right = x + 48 < at.right;
      const font = `700 12px ${style.font}`;
      this.text("died", x + (right ? 10 : -10), y, style.warning, font, right ? "left" : "right");
    });
  }

  // Fills the current path with each of these styles.
  #fill(...styles) {
    for (const fillStyle of styles) Object.assign(this.c, { fillStyle }).fill();
  }

  text(text, x, y, color, font, align = "left") {
    Object.assign(this.c, { fillStyle: color, font, textAlign: align, textBaseline: "middle" });
    this.c.fillText(text, x, y + 0.5);
  }

  // Draws the grid lines in the background; axis() draws the numbers in the foreground.
  grid() {
    for (const [x] of this.#ticks()) this.line(x, 0, x, this.at.bottom, this.style.grid, 1);
  }

  axis() {
    const { c, at, style } = this;
    if (!at.sizes.axis) return;
    if (at.axis < at.bottom) {
      c.fillStyle = style.bg;
      c.fillRect(0, at.axis, at.width, at.sizes.axis);
    }
    for (const [x, label] of this.#ticks()) {
      if (x >= at.right - 10) continue;
      this.text(label, x, at.axis + 14, style.muted, `12px ${style.font}`, "center");
    }
    this.line(at.left - 4, at.axis + 0.5, at.right + 4, at.axis + 0.5, style.hairline, 1);
  }

  #ticks() {
    const { at } = this;
    const zero = this.store.frame.start ?? 0;
    const [from, to] = at.view.map((time) => time - zero);
    const step = roundStep(to - from, (at.right - at.left) / 105);
    const [scale, unit] = timeUnit(Math.max(Math.abs(from), Math.abs(to)) * 0.999);
    const digits = Math.max(0, -Math.floor(Math.log10(step * scale) + 1e-9));
    const ticks = [];
    for (let n = Math.ceil(from / step - 1e-9); n * step <= to; n++) {
      const label = n === 0 ? "0" : `${(n * step * scale).toFixed(digits)} ${unit}`;
      ticks.push([Math.round(at.x(zero + n * step)) + 0.5, label]);
    }
    return ticks;
  }

  line(x1, y1, x2, y2, color, width, dash = []) {
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
    const { c, at, style } = this;
    const [x, y, width, height] = at.box(bar.i);
    c.globalAlpha = this.#dim(bar.i);
    const [touch, failed] = [bar.op === "touch", bar.state === "failed"];
    const plain = touch ? style.warning : style.work[workKind(bar.label)];
    roundRect(c, x, y, width, height, 3);
    this.#fill(style.bg, failed ? this.#hatch(style.warning) : plain);
    const short = touch ? "!" : failed ? "✕" : bar.label?.match(/^[^→]*?(\d+)$/)?.[1];
    const [color, halo] = failed ? [style.fg, style.bg] : [readable(plain), plain];
    const texts = [bar.label, bar.label?.split(/ [(→]/)[0], short];
    if (height >= 11) this.labels.push({ ...bar, x, y, width, height, opacity: c.globalAlpha, texts, color, size: 11.5, halo });
    if (bar.i === this.focus?.i) this.#ring(x, y, width, height);
    c.globalAlpha = 1;
  }

  #bar(bar) {
    const { c, at, style } = this;
    const [x, y, width, height] = at.box(bar.i);
    const [open, failed] = [isOpen(bar), bar.state === "failed"];
    const color = failed ? style.warning : this.color(bar.rank);
    const kind = bar.op === "barrier" ? "recv" : bar.kind; // a barrier only waits
    const solid = !open && !failed && (kind === "send" || kind === "collective");
    c.globalAlpha = this.#dim(bar.i);
    roundRect(c, x, y, width, height, bar.kind === "request" ? height / 2 : 3.5);
    const paused = isPaused(bar);
    const ended = () => (solid ? color : alpha(color, { request: 0.42, recv: 0.06 }[kind] ?? 0.18));
    this.#fill(style.bg, failed ? this.#hatch(color) : paused ? alpha(color, 0.06)
      : open ? this.#fade(color, x, width) : ended());
    if (this.waits?.has(bar.i)) this.#wait(bar, x, y, width, height);
    if (!solid && width > 4) this.#outline(x, y, width, height, color, open, kind);
    else if (!solid) this.#fill(color);
    const ink = solid ? readable(color) : style.fg;
    if (height >= 10) {
      const hatched = this.waits?.has(bar.i) || paused || failed;
      const tinted = !hatched && (open || kind !== "recv");
      const halo = solid ? color : tinted ? "transparent" : style.bg; // keeps labels legible above arrows
      const call = !open && !failed && bar.collective >= 0 ? `${bar.op} ${bar.collective}` : "";
      this.labels.push({ opacity: c.globalAlpha, texts: this.#labelOptions(bar), call, x, y, width, height, color: ink, size: Math.min(12, height - 2), halo });
    }
    if (bar.i === this.focus?.i) this.#ring(x, y, width, height);
    c.globalAlpha = 1;
  }

  // Hatches the part of a bar in which its rank is waiting.
  #wait(bar, x, y, width, height) {
    const { c, at, style } = this;
    const [since, waited] = this.waits.get(bar.i);
    const [from, end] = [since, since + waited].map((s) => clamp(at.x(bar.start + s), x, x + width));
    roundRect(c, from, y, end - from, height, 3);
    this.#fill(alpha(style.bg, 0.62), this.#hatch(style.fg));
  }

  #outline(x, y, width, height, color, open, kind) {
    const { c } = this;
    c.save();
    if (open) { // an open bar has no right edge
      c.beginPath();
      c.rect(x - 2, y - 2, width, height + 4);
      c.clip();
    }
    const radius = kind === "request" ? height / 2 : 3;
    roundRect(c, x + 0.75, y + 0.75, width - 1.5, height - 1.5, radius);
    Object.assign(c, { strokeStyle: color, lineWidth: kind === "recv" ? 1 : 1.5 });
    c.setLineDash(open ? [5, 3] : []);
    c.stroke();
    c.restore();
  }

  #ring(x, y, width, height) {
    roundRect(this.c, x - 2.5, y - 2.5, width + 5, height + 5, 6);
    Object.assign(this.c, { strokeStyle: this.style.fg, lineWidth: 1.5 });
    this.c.stroke();
  }

  #labelOptions(bar) {
    const [called, op] = [call(bar, this.store), bar.op];
    if (bar.state === "failed") return [`✕ ${op} failed`, `✕ ${op}`, "✕"];
    if (isPaused(bar)) return [`paused before ${called}`, `paused before ${op}`, "paused", op];
    if (!isOpen(bar)) return [["collective", "request"].includes(bar.kind) && bar.nbytes
      ? `${called} ${humanBytes(bar.nbytes)}` : called, called, op];
    const { live, lanes, open: openVerb } = this.store.frame;
    const open = lanes[this.store.lane(bar.i)].died === undefined ? openVerb : "died in";
    const verb = live ? { blocked: "blocked in " }[bar.state] ?? "" : `${open} `;
    return [`${verb}${["recv", "store"].includes(bar.kind) ? called : op}`, `${verb}${op}`, op];
  }

  // The labels that fit into the visible parts of their bars. A collective is named once: on the
  // first rank with space for its longest text. A label that fits into none of its marks follows them.
  #fitting() {
    const [{ c, at, style: { font, fg, bg } }, named, inside] = [this, new Map(), new Set()];
    const wide = (t, size) => Object.assign(c, { font: `500 ${size}px ${font}` }).measureText(t).width;
    const fitting = ({ size, texts }, available) => texts.find((t) => t && wide(t, size) <= available) ?? "";
    const fitted = this.labels.map((label) => {
      const [from, end, pad] = [Math.max(label.x, at.left), Math.min(label.x + label.width, at.right), Math.min(5, label.width / 6)];
      const text = fitting(label, end - from - 1.6 * pad);
      if (text) inside.add(label.texts[0]);
      if (text.length > (named.get(label.call) ?? "").length) named.set(label.call, text);
      return { ...label, from: from + pad, end, text };
    }).map((label) => {
      const after = !inside.has(label.texts[0]) && fitting(label, Math.min(label.next, at.right) - label.end - 10);
      return after ? { ...label, from: label.end + 4, text: after, color: fg, halo: bg } : label;
    });
    return fitted.filter(({ call, text }) => text && (!call || (named.get(call) === text && named.delete(call))));
  }

  #label({ opacity, text, from, y, height, size, color, halo }) {
    const { c } = this;
    Object.assign(c, { font: `500 ${size}px ${this.style.font}`, globalAlpha: opacity,
      strokeStyle: halo, lineWidth: clamp(height - size, 0.5, 2.5), lineJoin: "round", textAlign: "left", textBaseline: "middle" });
    c.strokeText(text, from, y + height / 2 + 0.5); // keeps labels legible above arrows
    this.text(text, from, y + height / 2, color, c.font);
  }

  // Draws a bar that is too narrow for details.
  #thin(i) {
    const { c, at, style, store } = this;
    const [x, y, width, height] = at.box(i);
    const { kind, state, label } = store.categories[store.category[i]];
    const [mark, failed] = [kind === "mark", state === "failed"];
    c.globalAlpha = this.#dim(i);
    c.fillStyle = failed ? style.warning : mark ? style.work[workKind(label)]
      : this.color(store.tracks[store.track[i]].rank);
    if (!failed && !mark) c.globalAlpha *= FILL[kind];
    c.fillRect(x, y, width, height);
    if (i === this.focus?.i) this.#ring(x, y, width, height);
    c.globalAlpha = 1;
  }

  // A faint band through the members of a collective, lane by lane; only its edges cross other
  // lanes.
  #ribbons(bars) {
    const collectives = new Set(bars.map(({ collective }) => collective).filter((n) => n >= 0));
    if (this.focus?.collective >= 0) collectives.add(this.focus.collective);
    for (const collective of collectives) this.#ribbon(collective);
  }

  #ribbon(collective) {
    const { c, at, style, store } = this;
    const members = store.members(collective).filter((i) => !store.paused(i));
    const mixed = new Set(members.map((i) => store.categories[store.category[i]].op)).size > 1;
    const color = mixed ? style.warning : style.fg;
    const dim = this.#dim(...members);
    for (let i = 1; i < members.length; i++) {
      const [x1, y1, w1, h1] = at.box(members[i - 1]);
      const [x2, y2, w2] = at.box(members[i]);
      const middle = (y1 + h1 + y2) / 2;
      const adjacent = store.lane(members[i]) === store.lane(members[i - 1]) + 1;
      const side = (from, to, y, end) => c.bezierCurveTo(from, middle, to, middle, to, end);
      c.beginPath();
      c.moveTo(x1, y1 + h1);
      side(x1, x2, y1 + h1, y2);
      if (adjacent) c.lineTo(x2 + w2, y2);
      else c.moveTo(x2 + w2, y2);
      side(x2 + w2, x1 + w1, y2, y1 + h1);
      if (adjacent) c.closePath();
      c.globalAlpha = dim;
      c.fillStyle = alpha(color, this.bright && dim === 1 ? 0.2 : mixed ? 0.18 : style.dark ? 0.14 : 0.085);
      if (adjacent) c.fill();
      Object.assign(c, { strokeStyle: alpha(color, adjacent ? 0.32 : 0.5), lineWidth: 0.75 });
      if (!adjacent || Math.min(w1, w2) > 4) c.stroke();
    }
    c.globalAlpha = 1;
  }

  #fade(color, x, width) {
    const gradient = this.c.createLinearGradient(Math.max(x, this.at.left), 0, x + width, 0);
    gradient.addColorStop(0, alpha(color, 0.38));
    gradient.addColorStop(1, alpha(color, 0.04));
    return gradient;
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

// A short description of a bar, such as "send to rank 1" or "all_reduce max".
export function call(bar, store) {
  const peer = bar.peer === undefined ? "any rank" : store.name(bar.peer);
  if (bar.kind === "send") return bar.label || `send to ${peer}`;
  if (bar.kind === "recv") return bar.label || `recv from ${peer}`;
  if (bar.kind === "store") return `${bar.op}(${bar.label ?? ""})`;
  return bar.kind === "mark" ? bar.label ?? "computation" : `${bar.op} ${bar.label ?? ""}`.trim();
}
