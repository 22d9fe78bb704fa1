// Bars too small to be told apart: how much of each pixel they cover, a strip per row. What is
// wide enough is drawn as itself, and so are failures and what has not ended. A row full of small
// bars is summed up: how much of the time is in them, and paler how much of that is waiting.

import { LEAST } from "./layout.js";
import { channels } from "./colors.js";
import { clamp } from "./numbers.js";

const WIDE = 12; // from this many pixels on a bar is an object with words
const ALONE = 2; // pixels to its neighbours: then even a small bar is drawn as itself
const CROWD = 500; // failures and unfinished operations beyond this number have no words
const FAINT = 0.3; // what touches a pixel at all colours it so much
const EACH_BAR = 7; // pixels: where bars have less each, their row is a sum
const DENSE = 0.25; // of the time: what is less is better seen as it is
const BIN = 6; // pixels of a step of the sum

// How strongly a kind of bar is filled where it is too small for more.
export const FILL = { send: 1, collective: 1, request: 0.6, recv: 0.5, store: 0.5, mark: 1 };

export class Strips {
  constructor(painter) {
    const { at, store } = painter;
    Object.assign(this, { painter, at, store, rows: [], sums: [] });
    this.width = Math.max(1, Math.ceil(at.right - at.left) + 8);
  }

  // Takes stock: {bars: wide ones, as objects; thin: narrow ones, as numbers}; the rest are strips.
  sort() {
    const { at, store } = this;
    const [bars, thin] = [[], []];
    store.tracks.forEach((track, t) => {
      const [first, last] = at.inSight(track);
      const sum = (last - first) * EACH_BAR > this.width ? this.#sum(track, t) : null;
      if (sum) return this.sums.push(sum);
      const row = this.#row(track, t, bars, thin);
      if (row) this.rows.push({ ...row, t, mark: track.mark });
    });
    const special = [...new Set([...store.open, ...store.odd])].filter((i) => {
      const [x, , width] = at.box(i);
      return x <= at.right && x + width >= at.left;
    });
    if (special.length > CROWD) thin.push(...special);
    else bars.push(...special.map((i) => store.bar(i)));
    return { bars, thin };
  }

  #row(track, t, bars, thin) {
    const { store, at, painter: { bright } } = this;
    const { start, end, look, open, odd } = store;
    const [first, last] = at.inSight(track);
    const [from, scale] = [at.view[0], (at.right - at.left) / (at.view[1] - at.view[0])];
    const cover = { plain: null, dim: null };
    let right = -9;
    for (let n = first; n < last; n++) {
      const i = track.items[n];
      if (open.has(i) || odd.has(i)) continue;
      const [x, width] = [(start[i] - from) * scale, (end[i] - start[i]) * scale];
      const next = n + 1 < last ? (start[track.items[n + 1]] - from) * scale : Infinity;
      if (width >= WIDE) bars.push(store.bar(i));
      else if (width >= 4 || alone(x, width, right, next)) thin.push(i);
      else {
        const part = !bright || bright.bars.has(i) ? "plain" : "dim";
        cover[part] ??= new Float32Array(this.width);
        add(cover[part], x + 4, Math.max(width, 0.2), FILL[store.looks[look[i]].kind]);
      }
      right = x + width;
    }
    return cover.plain || cover.dim ? cover : null;
  }

  // How much of each step a row's bars cover: those that are bright, their waiting, and the others.
  #sum(track, t) {
    const { store, at, painter: { bright } } = this;
    const [first, last] = at.inSight(track);
    const [bars, waits, dim] = [0, 1, 2].map(() => new Float32Array(Math.ceil(this.width / BIN)));
    const waiting = track.mark ? null : store.causes?.waits;
    const put = (cover, from, to) => {
      const [x, end] = [at.x(from), at.x(to)]
        .map((place) => clamp((place - at.left + 4) / BIN, 0, cover.length));
      if (end > x) add(cover, x, end - x, 1);
    };
    for (let n = first; n < last; n++) {
      const i = track.items[n];
      const [from, to] = [store.start[i], store.until(i, at.now)];
      const lit = !bright || bright.bars.has(i);
      put(lit ? bars : dim, from, to);
      const wait = lit && waiting?.get(i);
      if (wait) put(waits, from + wait[0], from + wait[0] + wait[1]);
    }
    const whole = bars.reduce((all, part, n) => all + part + dim[n], 0);
    return whole > DENSE * bars.length ? { t, mark: track.mark, bars, waits, dim } : null;
  }

  #area({ t, mark, bars, waits, dim }) {
    const { c, look } = this.painter;
    const [y, height] = this.at.line(t);
    c.fillStyle = mark ? look.mark : this.painter.color(this.store.tracks[t].rank);
    const steps = (strength, tall) => {
      c.globalAlpha = strength;
      bars.forEach((_, n) => {
        const part = Math.min(1, tall(n)) * height;
        if (part > 0.1) c.fillRect(this.at.left - 4 + n * BIN, y + height - part, BIN, part);
      });
    };
    steps(0.2, (n) => dim[n] + bars[n]);
    steps(0.3, (n) => bars[n]);
    steps(1, (n) => bars[n] - waits[n]);
    c.globalAlpha = 1;
  }

  // Paints the strips of computation, or those of communication.
  draw(mark) {
    for (const sum of this.sums) if (sum.mark === mark) this.#area(sum);
    const rows = this.rows.filter((row) => row.mark === mark);
    if (!rows.length) return;
    const image = new ImageData(this.width, rows.length);
    rows.forEach((row, n) => this.#pixels(row, image.data, 4 * this.width * n));
    const sheet = new OffscreenCanvas(this.width, rows.length);
    sheet.getContext("2d").putImageData(image, 0, 0);
    const { c } = this.painter;
    c.imageSmoothingEnabled = false;
    rows.forEach(({ t }, n) => {
      const [y, height] = this.at.line(t);
      c.drawImage(sheet, 0, n, this.width, 1, this.at.left - 4, y, this.width, height);
    });
    c.imageSmoothingEnabled = true;
  }

  #pixels({ plain, dim, t, mark }, data, at) {
    const { look, store } = this.painter;
    const [red, green, blue] = channels(mark ? look.fg : this.painter.color(store.tracks[t].rank));
    const full = mark ? 255 * 0.2 : 255;
    for (let x = 0; x < this.width; x++, at += 4) {
      const a = Math.max(shade(plain?.[x] ?? 0), 0.25 * shade(dim?.[x] ?? 0));
      if (a) [data[at], data[at + 1], data[at + 2], data[at + 3]] = [red, green, blue, full * a];
    }
  }
}

const alone = (x, width, left, next) =>
  x - left > ALONE && next - x - Math.max(width, LEAST) > ALONE;
const shade = (cover) => (cover > 0 ? FAINT + (1 - FAINT) * Math.min(1, cover) : 0);

// Adds a bar to the pixels that it covers, in parts.
function add(cover, x, width, weight) {
  const last = Math.min(cover.length - 1, Math.floor(x + width));
  for (let p = Math.max(0, Math.floor(x)); p <= last; p++) {
    cover[p] += weight * (Math.min(p + 1, x + width) - Math.max(p, x));
  }
}
