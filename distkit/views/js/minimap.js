// The whole run in a narrow band under the axis, with a window where the picture is: drag it.

import { fit } from "./canvas.js";
import { clamp } from "./numbers.js";
import { h } from "./dom.js";
import { alpha, channels } from "./colors.js";

const TALL = 34;
const OFTEN = 1000; // milliseconds between two sketches of a run that goes on

export class Minimap {
  // onmove(time): the middle of the picture is wanted there.
  constructor(onmove) {
    this.canvas = h("canvas", { class: "dk-map", "aria-hidden": "true" });
    const move = (e) => onmove(this.#time(e.clientX));
    this.canvas.addEventListener("pointerdown", (e) => {
      this.canvas.setPointerCapture(e.pointerId);
      move(e);
    });
    this.canvas.addEventListener("pointermove", (e) => { if (e.buttons & 1) move(e); });
  }

  #time(clientX) {
    const { left } = this.canvas.getBoundingClientRect();
    const [first, last] = this.all;
    const part = clamp((clientX - left - this.left) / (this.right - this.left), 0, 1);
    return first + part * (last - first);
  }

  draw({ store, layout, look, color }, all, view) {
    const { width, left, right } = layout;
    Object.assign(this, { all, left, right });
    const c = fit(this.canvas, width, TALL);
    c.clearRect(0, 0, width, TALL);
    const size = [Math.ceil(right - left), store.frame.lanes.length];
    const key = [store.version, look.bg, ...size, ...all].join();
    const now = performance.now();
    if (key !== this.key && !(store.frame.live && now - this.made < OFTEN)) {
      Object.assign(this, { key, made: now, sheet: sheet(store, size, all, color) });
    }
    const scale = (right - left) / (all[1] - all[0]);
    const x = (time) => left + (clamp(time, ...all) - all[0]) * scale;
    const [from, to] = view.map(x);
    c.imageSmoothingEnabled = true;
    c.drawImage(this.sheet, left, 4, right - left, TALL - 8);
    c.fillStyle = alpha(look.bg, 0.68);
    c.fillRect(left, 0, from - left, TALL);
    c.fillRect(to, 0, right - to, TALL);
    Object.assign(c, { strokeStyle: look.fg, lineWidth: 1.5 });
    c.beginPath();
    c.roundRect(from - 1, 1, Math.max(5, to - from + 2), TALL - 2, 4);
    c.stroke();
  }
}

// A row of pixels per lane: how much of each the rank spent in communication.
function sheet(store, [width, lanes], [first, last], color) {
  const covers = Array.from({ length: lanes }, () => new Float32Array(width));
  const scale = width / (last - first);
  for (const { rank, mark, items } of store.tracks) {
    const cover = covers[store.laneOf.get(rank)];
    if (mark || !cover) continue;
    for (const i of items) {
      const x = (store.start[i] - first) * scale;
      const end = (store.until(i, last) - first) * scale;
      for (let p = Math.max(0, Math.floor(x)); p <= Math.min(width - 1, Math.floor(end)); p++) {
        cover[p] += Math.min(p + 1, end) - Math.max(p, x) + 0.02;
      }
    }
  }
  const image = new ImageData(Math.max(1, width), Math.max(1, lanes));
  covers.forEach((cover, lane) => {
    const [red, green, blue] = channels(color(store.frame.lanes[lane].rank));
    cover.forEach((part, x) => {
      const strength = part ? 0.25 + 0.75 * Math.min(1, part) : 0.06;
      image.data.set([red, green, blue, 255 * strength], 4 * (lane * width + x));
    });
  });
  const canvas = new OffscreenCanvas(image.width, image.height);
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}
