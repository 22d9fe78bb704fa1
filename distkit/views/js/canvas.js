// Helpers for drawing on a canvas.

// Sets the size of a canvas [CSS pixels] at screen resolution; returns its context.
export function fit(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  const [wide, high] = [width, height].map((n) => Math.max(1, Math.round(n * ratio)));
  if (canvas.width !== wide || canvas.height !== high) [canvas.width, canvas.height] = [wide, high];
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

export function roundRect(c, x, y, width, height, radius) {
  c.beginPath();
  c.roundRect(x, y, width, height, Math.max(0, Math.min(radius, width / 2, height / 2)));
}
