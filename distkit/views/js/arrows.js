// Messages: arrows from the sender's bar to the receiver's.

import { clamp, humanBytes } from "./numbers.js";
import { roundRect } from "./canvas.js";

// Minimum width per arrow [px]. If arrows are denser, a thin arrow may represent several.
const MIN_SPACE = 9;
// Width of an interval in which at most one thin arrow is drawn between two lanes [px].
const INTERVAL = 18;

export class Arrows {
  constructor(renderer) {
    const { c, at, style, store } = renderer;
    Object.assign(this, { renderer, c, at, style, store, labels: [], uniform: store.messageSize });
    const requests = store.categories.filter(({ op }) => op === "push" || op === "pull");
    this.keys = new Set(requests.map(({ label }) => label));
    this.list = this.#visible(); // [index, path] of each arrow
    this.size = this.many ? 6 : clamp(0.6 * at.sizes.row * at.scale, 7, 11); // length of a head [px]
  }

  drawHeads() {
    for (const [a, path] of this.list) this.#end(a, path);
    if (!this.many) for (const [a, path] of this.list) this.#sizeLabel(a, path);
  }

  #dim(a) {
    const { bright } = this.renderer;
    return !bright || bright.arrows.has(a) ? 1 : 0.25;
  }

  // The visible arrows. If there are many, one arrow represents all that are sent between the same
  // lanes at almost the same time.
  #visible() {
    const { at, store } = this;
    const [from, to] = at.view;
    const visible = [];
    for (let a = 0; a < store.arrows; a++) {
      const begin = store.send[a] < 0 ? store.start[store.recv[a]] : store.sent[a];
      const end = store.received[a];
      if (begin > to || end < from || (Number.isNaN(end) && begin < from)) continue;
      if (store.send[a] >= 0 || store.recv[a] >= 0) visible.push(a);
    }
    const capacity = (at.right - at.left) / MIN_SPACE;
    this.many = visible.length > capacity;
    const shown = this.many ? this.#thinned(visible) : visible;
    return shown.map((a) => [a, at.path(a)]);
  }

  #thinned(arrows) {
    const { at, store } = this;
    const keys = new Set();
    const scale = (at.right - at.left) / INTERVAL / (at.view[1] - at.view[0]);
    return arrows.filter((a) => {
      const [s, r] = [store.send[a], store.recv[a]];
      if (s < 0 || r < 0) return true;
      const column = Math.floor((store.sent[a] - at.view[0]) * scale);
      const key = (column * 512 + store.lane(s)) * 512 + store.lane(r);
      if (keys.has(key) && !this.renderer.bright?.arrows.has(a)) return false;
      keys.add(key);
      return true;
    });
  }

  shaft(a, [x1, y1, x2, y2, delivered]) {
    const { c, many } = this;
    const width = this.renderer.bright?.arrows.has(a) ? 2.6 : many ? 1 : 1.7;
    c.globalAlpha = this.#dim(a);
    this.renderer.line(x1, y1, x2, y2, this.#colorOf(a, delivered), width, delivered ? [] : [4, 4]);
    c.globalAlpha = 1;
  }

  #end(a, path) {
    const [x1, y1, x2, y2, delivered] = path;
    const bright = this.renderer.bright?.arrows.has(a);
    if (bright) this.shaft(a, path);
    const length = Math.hypot(x2 - x1, y2 - y1) || 1;
    const color = this.#colorOf(a, delivered);
    this.c.globalAlpha = this.#dim(a);
    const [ux, uy] = [(x2 - x1) / length, (y2 - y1) / length];
    if (delivered) this.#head(x2, y2, ux, uy, Math.min(this.size, length), color);
    else this.#missingEnd(...this.store.send[a] >= 0 ? [x2, y2 - 5 * uy] : [x1, y1 + 5 * uy], color);
    this.c.globalAlpha = 1;
  }

  #colorOf(a, delivered) {
    const { store, style } = this;
    return delivered || store.frame.live ? this.renderer.color(store.arrow(a).src) : style.warning;
  }

  #head(x, y, ux, uy, size, color) {
    const { c } = this;
    const half = size * 0.42;
    c.beginPath();
    c.moveTo(x, y);
    c.lineTo(x - ux * size - uy * half, y - uy * size + ux * half);
    c.lineTo(x - ux * size + uy * half, y - uy * size - ux * half);
    c.closePath();
    Object.assign(c, { fillStyle: color, strokeStyle: this.style.bg, lineWidth: 1 });
    c.stroke();
    c.fill();
  }

  // A circle at the open end of an arrow, beside the bar so that the bar's label stays legible.
  #missingEnd(x, y, color) {
    const { c } = this;
    c.beginPath();
    c.arc(x, y, 4, 0, 2 * Math.PI);
    Object.assign(c, { fillStyle: this.style.bg, strokeStyle: color, lineWidth: 1.7 });
    c.fill();
    c.stroke();
  }

  // Draws the label of a message, or its size if it has no label, if there is space next to its arrow.
  // If all pushes and pulls have the same key, they have no label. A size that all messages share is
  // shown only once.
  #sizeLabel(a, [x1, y1, x2, y2, delivered]) {
    if (!delivered || Math.abs(y2 - y1) < 34) return;
    const { c, style } = this;
    const arrow = this.store.arrow(a);
    const isOnlyKey = this.keys.size === 1 && this.keys.has(arrow.label);
    const isRepeated = this.labels.length && !arrow.label && this.uniform;
    if (!arrow.nbytes || isOnlyKey || isRepeated) return;
    const text = arrow.label || humanBytes(arrow.nbytes);
    c.font = `11.5px ${style.font}`;
    const width = c.measureText(text).width + 8;
    const [x, y] = [(x1 + x2) / 2 + 6, (y1 + y2) / 2];
    const { tops, heights } = this.at;
    const betweenLanes = tops.every((top, i) => y + 9 <= top || y - 9 >= top + heights[i]);
    const free = ([a, b, w]) => x + width < a || a + w < x || Math.abs(b - y) > 16;
    if (x + width > this.at.right || !this.labels.every(free) || !betweenLanes) return;
    this.labels.push([x, y, width]);
    c.globalAlpha = this.#dim(a);
    c.fillStyle = style.bg;
    roundRect(c, x - 1, y - 8, width, 16, 4);
    c.fill();
    this.renderer.text(text, x + 3, y, style.muted, c.font);
    c.globalAlpha = 1;
  }
}
