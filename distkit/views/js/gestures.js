// Wheel, drag and pinch by d3-zoom, in terms of the times that are shown.

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
