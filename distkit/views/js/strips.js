// Draws bars that are too small to distinguish. A row with many bars is drawn as a sum: the fraction
// of time in bars, with waiting in a paler shade. If the bars cover only a small part of the time, the
// row is drawn as strips of color. Failures and open operations are drawn individually.

import { clamp } from "./numbers.js";

const MIN_LABELED_WIDTH = 12; // minimum width of a bar with a label [px]
const MAX_LABELED = 500; // maximum number of failures and open operations with labels
const MIN_PIXELS_PER_BAR = 7; // rows with less space per bar are drawn as sums
const BIN = 6; // width of a bin of a sum [px]
const DENSE_FRACTION = 0.25; // rows with a smaller fraction of time in bars are drawn as strips
const MIN_OPACITY = 0.3; // minimum opacity of a pixel that is partly covered by a bar

// Opacity of bars that are too small for details.
export const FILL = { send: 1, collective: 1, request: 0.6, recv: 0.5, store: 0.5, mark: 1 };

export class Strips {
  constructor(renderer) {
    const { at, store } = renderer;
    Object.assign(this, { renderer, at, store, sums: [] });
    this.width = Math.max(1, Math.ceil(at.right - at.left) + 8);
  }

  // Returns wide bars as objects, and thin ones as indices; the bars of crowded rows become sums.
  classify() {
    const { at, store } = this;
    const [bars, thin] = [[], []];
    store.tracks.forEach((track, t) => {
      const [first, last] = at.visibleRange(track);
      if ((last - first) * MIN_PIXELS_PER_BAR > this.width) return this.sums.push(this.#sum(track, t, BIN));
      track.items.subarray(first, last).forEach((i, n) => {
        if (store.open.has(i) || store.special.has(i)) return;
        const next = at.x(store.start[track.items[first + n + 1]] ?? Infinity);
        if (at.box(i)[2] >= MIN_LABELED_WIDTH) bars.push({ ...store.bar(i), next });
        else thin.push(i);
      });
    });
    const individual = [...new Set([...store.open, ...store.special])].filter((i) => {
      const [x, , width] = at.box(i);
      return x <= at.right && x + width >= at.left;
    });
    if (individual.length > MAX_LABELED) thin.push(...individual);
    else bars.push(...individual.map((i) => store.bar(i)));
    return { bars, thin };
  }

  // The fractions of each bin that a row's bars cover: highlighted bars, their waits, and other bars.
  #sum(track, t, bin) {
    const { store, at, renderer: { bright } } = this;
    const [first, last] = at.visibleRange(track);
    const [bars, waits, dim] = [0, 1, 2].map(() => new Float32Array(Math.ceil(this.width / bin)));
    const waiting = track.mark ? null : store.waits;
    const put = (cover, from, to) => {
      const [x, end] = [at.x(from), at.x(to)]
        .map((position) => clamp((position - at.left + 4) / bin, 0, cover.length));
      if (end > x) add(cover, x, end - x);
    };
    for (let n = first; n < last; n++) {
      const i = track.items[n];
      const [from, to] = [store.start[i], store.endOf(i, at.now)];
      const isHighlighted = !bright || bright.bars.has(i);
      put(isHighlighted ? bars : dim, from, to);
      const wait = isHighlighted && waiting?.get(i);
      if (wait) put(waits, from + wait[0], from + wait[0] + wait[1]);
    }
    const covered = bars.reduce((sum, cover, n) => sum + cover + dim[n], 0);
    const dense = covered > DENSE_FRACTION * bars.length;
    return dense || bin === 1 ? { t, dense, bars, waits, dim } : this.#sum(track, t, 1);
  }

  // Draws each bin as high as its fraction of time in bars.
  #area(bars, waits, dim, y, height) {
    const drawBins = (opacity, heightOf) => {
      bars.forEach((_, n) => {
        const binHeight = Math.min(1, heightOf(n)) * height;
        if (binHeight > 0.1) this.#fill(opacity, n * BIN, y + height - binHeight, BIN, binHeight);
      });
    };
    drawBins(0.2, (n) => dim[n] + bars[n]);
    drawBins(0.3, (n) => bars[n]);
    drawBins(1, (n) => bars[n] - waits[n]);
  }

  #strip(bars, dim, y, height) {
    bars.forEach((cover, n) => {
      const opacity = Math.max(shade(cover), 0.25 * shade(dim[n]));
      if (opacity) this.#fill(opacity, n, y, 1, height);
    });
  }

  #fill(opacity, x, y, width, height) {
    const { c } = this.renderer;
    c.globalAlpha = opacity;
    c.fillRect(this.at.left - 4 + x, y, width, height);
  }

  // Draws the sums of computation or of communication.
  draw(mark) {
    const { c, style } = this.renderer;
    for (const { t, dense, bars, waits, dim } of this.sums) {
      const track = this.store.tracks[t];
      if (track.mark !== mark) continue;
      const [y, height] = this.at.row(t);
      c.fillStyle = mark ? style.work[""] : this.renderer.color(track.rank);
      if (dense) this.#area(bars, waits, dim, y, height);
      else this.#strip(bars, dim, y, height);
    }
    c.globalAlpha = 1;
  }
}

const shade = (cover) => (cover > 0 ? MIN_OPACITY + (1 - MIN_OPACITY) * Math.min(1, cover) : 0);

// Adds a bar to the bins that it overlaps, in proportion to the overlap.
function add(cover, x, width) {
  const last = Math.min(cover.length - 1, Math.floor(x + width));
  for (let p = Math.max(0, Math.floor(x)); p <= last; p++)
    cover[p] += Math.min(p + 1, x + width) - Math.max(p, x);
}
