// Colours as numbers: a canvas wants them mixed.

// Red, green and blue of "#rrggbb" or "rgb(…)", the two forms in which a canvas names colours.
export function channels(color) {
  if (!color.startsWith("#")) return color.match(/[\d.]+/g).slice(0, 3).map(Number);
  return [1, 3, 5].map((i) => parseInt(color.slice(i, i + 2), 16));
}

export function alpha(color, a) {
  return `rgba(${channels(color).join(",")},${a})`;
}

export function brightness(color) {
  const [r, g, b] = channels(color);
  return 0.299 * r + 0.587 * g + 0.114 * b;
}

// Black or white, whichever reads better on a colour.
export const readable = (color) => (brightness(color) > 125 ? "#101418" : "#ffffff");
