// Numbers as people read them; units.py says the same in Python.

export const short = (x) => (Math.abs(x) >= 100 ? x.toFixed(0) : String(Number(x.toPrecision(3))));
export const plural = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;

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
