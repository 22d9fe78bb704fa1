// Which times are shown, and how the reader moves them: buttons, keys, and by d3-zoom wheel, drag
// and pinch.

import { h, still } from "./dom.js";
import { clamp } from "./numbers.js";
import { d3 } from "./vendor/d3.js";

const GLIDES = 180; // milliseconds
const FINEST = 1e-7; // seconds in sight at most closely

export class Gestures {
  // takes(event): whether it is for us; onview([from, to]): what the reader wants to see.
  constructor(canvas, takes, onview) {
    this.canvas = canvas;
    this.zoom = d3.zoom().filter(takes)
      .extent(() => [[this.left, 0], [this.right, 1]])
      .on("zoom", ({ sourceEvent, transform }) => {
        if (sourceEvent && this.base) onview([this.left, this.right].map((x) => this.#time(transform.invertX(x))));
      });
    d3.select(canvas).call(this.zoom).on("dblclick.zoom", null);
  }

  // What is shown now, and what there is. Both may have changed by other means since.
  follow({ left, right }, [from, to], [first, last]) {
    this.base ??= [first, last]; // the reference of all transforms: it stays, while a run grows
    Object.assign(this, { left, right });
    const span = this.base[1] - this.base[0];
    const k = span / (to - from);
    this.zoom.scaleExtent([Math.min(k, span / (last - first)), Math.max(k, span / FINEST)])
      .translateExtent([[this.#x(first), -Infinity], [this.#x(last), Infinity]]);
    this.canvas.__zoom = d3.zoomIdentity.translate(left - k * this.#x(from), 0).scale(k); // without an event
  }

  #x(time) {
    return this.left + ((time - this.base[0]) / (this.base[1] - this.base[0])) * (this.right - this.left);
  }

  #time(x) {
    return this.base[0] + ((x - this.left) / (this.right - this.left)) * (this.base[1] - this.base[0]);
  }
}

export const sideways = (e) => Math.abs(e.deltaX) > Math.abs(e.deltaY) || (e.shiftKey && !e.ctrlKey);

export class Viewport {
  // all(): the first and the last time; rest(): what is shown until the reader chooses, reset(): goes
  // back to that; onchange(): the choice has changed.
  constructor({ all, rest, reset, onchange }) {
    Object.assign(this, { all, rest, reset, onchange, zoomed: null, armed: false });
  }

  get shown() {
    return this.zoomed ?? this.rest();
  }

  show([from, to]) {
    const [first, last] = this.all();
    const span = clamp(to - from, FINEST, last - first);
    const start = clamp(from, first, last - span);
    this.zoomed = span > 0.999 * (last - first) ? null : [start, start + span];
    this.onchange();
  }

  glide(target) {
    const [from, begin] = [this.shown, performance.now()];
    if (still()) return this.show(target);
    const step = (time) => {
      const t = clamp((time - begin) / GLIDES, 0, 1);
      const eased = 1 - (1 - t) ** 3;
      this.show([0, 1].map((i) => from[i] + eased * (target[i] - from[i])));
      if (t < 1) requestAnimationFrame(step);
    };
    requestAnimationFrame(step);
  }

  zoom(factor) {
    const [from, to] = this.shown;
    const [center, half] = [(from + to) / 2, ((to - from) / 2) * factor];
    this.glide([center - half, center + half]);
  }

  center(time) {
    const [from, to] = this.shown;
    this.show([time - (to - from) / 2, time + (to - from) / 2]);
  }

  // Moves to a time that is out of sight.
  seek(time) {
    const [from, to] = this.shown;
    if (time < from || time > to) this.center(time);
  }

  pan(part) {
    const [from, to] = this.shown;
    this.glide([from, to].map((time) => time + part * (to - from)));
  }

  // A wheel that merely scrolls the page past the picture does not zoom it.
  takes(e) {
    if (e.type !== "wheel") return !e.button;
    const out = e.deltaY > 0 && !this.zoomed;
    return (this.armed || e.ctrlKey || e.metaKey) && (!out || e.ctrlKey) && !sideways(e);
  }

  keys() {
    const [all, closer] = [() => this.reset(), () => this.zoom(0.5)];
    return { ArrowLeft: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2), "+": closer, "=": closer,
      "-": () => this.zoom(2), 0: all, Home: all };
  }

  tools() {
    const button = (label, sign, act) => {
      const b = h("button", { type: "button", "aria-label": label, title: label }, sign);
      b.addEventListener("click", act);
      return b;
    };
    return h("div", { class: "dk-tools" }, button("zoom in", "+", () => this.zoom(0.5)),
      button("zoom out", "−", () => this.zoom(2)), button("show all", "⤢", () => this.reset()));
  }
}
