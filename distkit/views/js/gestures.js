// The visible time range, and the controls that change it: buttons, keys, and the wheel, drag and
// pinch gestures of d3-zoom.

import { button, h, handleKey, reducedMotion } from "./dom.js";
import { clamp, rescale } from "./numbers.js";
import { d3 } from "./vendor/d3.js";

const GLIDE = 180; // duration of an animated change of the range [ms]
const MAX_PINCH = 40; // maximum step of a pinch gesture [px]
const MIN_RANGE = 1e-7; // minimum visible time range [s]

class Gestures {
  // handles(event) returns whether to handle an event; onview([from, to]) receives the chosen range.
  constructor(canvas, handles, onview) {
    Object.assign(this, { canvas, edges: [0, 0] });
    this.zoom = d3.zoom().filter(handles)
      // pinch gestures are wheel events with Ctrl and small steps
      .wheelDelta((e) => -e.deltaY * (e.deltaMode ? 0.05 : 0.002) * (e.ctrlKey && Math.abs(e.deltaY) < MAX_PINCH ? 10 : 1))
      .extent(() => [[this.edges[0], 0], [this.edges[1], 1]])
      .on("zoom", ({ sourceEvent, transform }) => {
        if (!sourceEvent || !this.base) return;
        onview(this.edges.map((x) => rescale(transform.invertX(x), this.edges, this.base)));
      });
    d3.select(canvas).call(this.zoom).on("dblclick.zoom", null);
  }

  // Sets the edges of the plot, the visible range and the full range.
  follow({ left, right }, [from, to], [first, last]) {
    this.base ??= [first, last]; // the reference of all transforms, constant while a run grows
    this.edges = [left, right];
    const x = (time) => rescale(time, this.base, this.edges);
    const span = this.base[1] - this.base[0];
    const k = span / (to - from);
    this.zoom.scaleExtent([Math.min(k, span / (last - first)), Math.max(k, span / MIN_RANGE)])
      .translateExtent([[x(first), -Infinity], [x(last), Infinity]]);
    const start = left - k * x(from);
    this.canvas.__zoom = d3.zoomIdentity.translate(start, 0).scale(k); // set directly, so that no zoom event is sent
  }
}

const sideways = (e) => Math.abs(e.deltaX) > Math.abs(e.deltaY) || (e.shiftKey && !e.ctrlKey);

export class Viewport {
  // all() returns the first and the last time; the view has on() and scheduleFrame(). armed: whether
  // the wheel zooms, as it does once the pointer has moved over the canvas.
  constructor(view, all) {
    Object.assign(this, { view, all, zoomed: null, armed: false });
    view.on(window, "wheel", (e) => {
      if (!(e.target instanceof HTMLCanvasElement)) this.armed = false;
    }, { passive: true });
  }

  get shown() {
    return this.zoomed ?? this.all();
  }

  show([from, to]) {
    const [first, last] = this.all();
    const span = clamp(to - from, MIN_RANGE, last - first);
    const start = clamp(from, first, last - span);
    this.zoomed = span > 0.999 * (last - first) ? null : [start, start + span];
    this.view.scheduleFrame();
  }

  glide(target, end = () => this.show(target)) {
    const [from, begin] = [this.shown, performance.now()];
    if (reducedMotion()) return end();
    const step = (time) => {
      const t = Math.max(0, (time - begin) / GLIDE);
      if (t >= 1) return end();
      const eased = 1 - (1 - t) ** 3;
      this.show([0, 1].map((i) => from[i] + eased * (target[i] - from[i])));
      requestAnimationFrame(step);
    };
    requestAnimationFrame(step);
  }

  reset() {
    this.glide(this.all(), () => { // the whole run may have grown
      this.zoomed = null;
      this.view.scheduleFrame();
    });
  }

  zoom(factor) {
    const [from, to] = this.shown;
    const [center, half] = [(from + to) / 2, ((to - from) / 2) * factor];
    this.glide([center - half, center + half]);
  }

  // Centers a time that is outside the visible range.
  seek(time) {
    const [from, to] = this.shown;
    if (time < from || time > to) this.show([time - (to - from) / 2, time + (to - from) / 2]);
  }

  pan(fraction, immediately = false) {
    const [from, to] = this.shown;
    const target = [from, to].map((time) => time + fraction * (to - from));
    if (immediately) this.show(target);
    else this.glide(target);
  }

  // Returns whether to handle an event. Wheel events that scroll the page are not handled.
  handles(e) {
    if (e.type !== "wheel") return !e.button;
    const zoomsOut = e.deltaY > 0 && !this.zoomed;
    return (this.armed || e.ctrlKey || e.metaKey) && (!zoomsOut || e.ctrlKey) && !sideways(e);
  }

  keys() {
    const [all, closer] = [() => this.reset(), () => this.zoom(0.5)];
    return {
      ArrowLeft: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2),
      "+": closer, "=": closer, "-": () => this.zoom(2), 0: all, Home: all,
    };
  }

  tools() {
    return h("div", { class: "dk-tools" }, button("zoom in", "+", () => this.zoom(0.5)),
      button("zoom out", "−", () => this.zoom(2)), button("show the whole run", "⤢", () => this.reset()));
  }
}

// Handles pointer and key events on a view's canvas. hit(x, y) returns the item at a position,
// onMove(x, y) is called when the pointer moves, onKey(e) returns the action of a key, and edges()
// returns the left and right edges of the plot, or undefined if nothing is drawn yet.
export function listen(view, canvas, { hit, onMove, edges, onKey }) {
  const { viewport } = view;
  const on = (type, act, options) => view.on(canvas, type, act, options);
  const position = (e) => {
    const box = canvas.getBoundingClientRect();
    return [e.clientX - box.left, e.clientY - box.top];
  };
  let drag = null;
  on("pointermove", (e) => {
    viewport.armed ||= e.movementX !== 0 || e.movementY !== 0;
    if (!edges()) return; // not drawn yet
    onMove(...position(e));
    if (!drag) {
      view.hovered = hit(...position(e));
      canvas.style.cursor = view.hovered ? "pointer" : "grab";
      if (!view.chosen) view.showTip(view.hovered, e.clientX, e.clientY);
    } else if ((drag.moved ||= Math.abs(e.clientX - drag.x) > 4)) {
      canvas.style.cursor = "grabbing";
      view.showTip(null);
    }
    view.scheduleFrame();
  });
  on("pointerdown", (e) => { if (!e.button) drag = { x: e.clientX, moved: false }; });
  on("pointerup", (e) => {
    const click = drag && !drag.moved;
    drag = null;
    if (click && edges()) view.choose(hit(...position(e)), e.clientX, e.clientY);
  });
  on("pointerleave", () => {
    [view.pointer, view.hovered, viewport.armed] = [null, null, false];
    if (!view.chosen) view.showTip(null);
    view.scheduleFrame();
  });
  on("dblclick", () => viewport.reset());
  on("wheel", (e) => {
    if (!(viewport.armed || e.ctrlKey) || !sideways(e)) return;
    e.preventDefault();
    const { left, right } = edges();
    viewport.pan((e.shiftKey && !e.deltaX ? e.deltaY : e.deltaX) / (right - left), true);
  }, { passive: false });
  on("keydown", (e) => handleKey(e, onKey(e)));
  on("blur", () => view.choose(null));
  return new Gestures(canvas, (e) => viewport.handles(e), (range) => {
    view.showTip(null);
    viewport.show(range);
  });
}
