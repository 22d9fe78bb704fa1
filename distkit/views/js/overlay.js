// Overlays of the picture: the time at the pointer, the visible range, and dimming of later times.

import { clamp, humanSeconds, rescale } from "./numbers.js";
import { alpha } from "./colors.js";

export function cursor({ context: c, layout: at, style, pointer, store }) {
  const x = clamp(pointer[0], at.left, at.right);
  const text = humanSeconds(at.time(x) - (store.frame.start ?? 0));
  c.font = `600 12px ${style.font}`;
  const width = c.measureText(text).width + 12;
  const left = clamp(x - width / 2, 0, at.width - width);
  c.fillStyle = style.hairline;
  c.fillRect(Math.round(x), 0, 1, at.axis);
  c.fillStyle = style.bg; // hides axis labels that the time at the pointer would partly cover
  c.fillRect(left - 24, at.axis + 4, width + 48, 21);
  Object.assign(c, { fillStyle: style.fg, textAlign: "left", textBaseline: "middle" });
  c.beginPath();
  c.roundRect(left, at.axis + 5, width, 19, 4);
  c.fill();
  c.fillStyle = style.bg;
  c.fillText(text, left + 6, at.axis + 15);
}

// A thin line under the axis that shows the visible time range.
export function rangeBar({ context: c, layout: at, style }, view, [first, last]) {
  const [from, to] = view.map((time) => rescale(clamp(time, first, last), [first, last], [at.left, at.right]));
  c.fillStyle = style.grid;
  c.fillRect(at.left, at.height - 4, at.right - at.left, 3);
  c.fillStyle = style.hairline;
  c.fillRect(from, at.height - 4, Math.max(6, to - from), 3);
}

// Dims times after the moment shown.
export function dimLater({ context: c, layout: at, style, dimmedAfter: time }) {
  const x = clamp(at.x(time), at.left - 4, at.right + 4);
  c.fillStyle = alpha(style.bg, 0.8);
  c.fillRect(x, 0, at.right + 5 - x, at.bottom);
  c.fillStyle = style.fg;
  c.fillRect(Math.round(x), 0, 1.5, at.bottom);
}

export function emptyMessage({ context: c, layout: at, style, store, stepped }) {
  const waiting = stepped ? "No operations yet." : "Waiting for the first operation …";
  const text = store.frame.live ? waiting : "Nothing was recorded.";
  Object.assign(c, { font: `14px ${style.font}`, fillStyle: style.muted, textAlign: "center" });
  c.fillText(text, (at.left + at.right) / 2, at.bottom / 2);
}
