// Human-readable numbers, as in distkit/_format.py.

export const short = (x) => (Math.abs(x) >= 100 ? x.toFixed(0) : String(Number(x.toPrecision(3))));
export const grouped = (n) => n.toLocaleString("en");
export const plural = (n, noun) => `${grouped(n)} ${noun}${n === 1 ? "" : "s"}`;
export const percent = (part) => `${Math.round(100 * part)}%`;

export function humanBytes(n) {
  let unit = 0;
  for (; Math.abs(n) >= 1024 && unit < 4; unit++) n /= 1024;
  return `${short(n)} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
}

export function timeUnit(s) {
  if (Math.abs(s) >= 0.9995) return [1, "s"];
  return Math.abs(s) >= 0.9995e-3 ? [1e3, "ms"] : [1e6, "µs"];
}

export function humanSeconds(s) {
  const [scale, unit] = timeUnit(s);
  return `${short(s * scale)} ${unit}`;
}

export function roundStep(span, steps) {
  const raw = span / Math.max(1, steps);
  const power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map((k) => k * power).find((step) => step >= raw * 0.999);
}

export const clamp = (x, low, high) => Math.min(high, Math.max(low, x));

// Converts a number from one range to another, linearly.
export const rescale = (x, [from, to], [first, last]) => first + ((x - from) / (to - from)) * (last - first);

// -- values of tensors; non-finite values are strings ----------------------------------------

const WORDS = { nan: "NaN", inf: "∞", "-inf": "−∞" };

export function figure(v) {
  if (v === null || v === undefined) return "–";
  const plain = v === 0 || (Math.abs(v) < 1e6 && Math.abs(v) >= 1e-4);
  return WORDS[v] ?? (plain ? short(v) : v.toExponential(1)).replaceAll("-", "−");
}

export const finite = (values) => values.filter(Number.isFinite);
export const largest = (values) => Math.max(1e-30, ...finite(values).map(Math.abs));

export function nonFiniteCounts({ values }) {
  const counts = Object.entries(WORDS)
    .map(([key, word]) => [values.filter((v) => v === key).length, word]);
  return counts.filter(([n]) => n).map(([n, word]) => `${n} × ${word}`).join(", ");
}
