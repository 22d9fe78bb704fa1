// Bars too small to be told apart: how much of each pixel they cover, a strip per row. What is
// wide enough is drawn as itself, and so are failures and what has not ended.

import { LEAST } from "./layout.js";
import { channels } from "./colors.js";
import { FILL } from "./painter.js";

const WIDE = 12; // from this many pixels on a bar is an object with words
const ALONE = 2; // pixels to its neighbours: then even a small bar is drawn as itself
const CROWD = 500; // failures and unfinished operations beyond this number have no words
const FAINT = 0.3; // what touches a pixel at all colours it so much

export class Strips {
  constructor(painter) {
    const { at, store } = painter;
    Object.assign(this, { painter, at, store, rows: [] });
    this.width = Math.max(1, Math.ceil(at.right - at.left) + 8);
  }

  // Takes stock: {bars: wide ones, as objects; thin: narrow ones, as numbers}; the rest is in strips.
  sort() {
    const { at, store } = this;
    const [bars, thin] = [[], []];
    store.tracks.forEach((track, t) => {
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

  // Paints the strips of computation, or those of communication.
  draw(mark) {
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

const alone = (x, width, left, next) => x - left > ALONE && next - x - Math.max(width, LEAST) > ALONE;
const shade = (cover) => (cover > 0 ? FAINT + (1 - FAINT) * Math.min(1, cover) : 0);

// Adds a bar to the pixels that it covers, in parts.
function add(cover, x, width, weight) {
  const last = Math.min(cover.length - 1, Math.floor(x + width));
  for (let p = Math.max(0, Math.floor(x)); p <= last; p++) {
    cover[p] += weight * (Math.min(p + 1, x + width) - Math.max(p, x));
  }
}
