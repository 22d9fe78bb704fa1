// Colors as numbers, for mixing on a canvas, and the colors of the page.

// Red, green and blue of "#rrggbb" or "rgba(…)", the two forms in which a canvas returns colors.
export function channels(color) {
  if (!color.startsWith("#")) return color.match(/[\d.]+/g).slice(0, 3).map(Number);
  return [1, 3, 5].map((i) => parseInt(color.slice(i, i + 2), 16));
}

export function alpha(color, a) {
  return `rgba(${channels(color).join(",")},${a})`;
}

function luminance(color) {
  const [r, g, b] = channels(color).map((c) => (c / 255) ** 2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

// Near-black or white, whichever is more legible on a color.
export const readable = (color) => (luminance(color) > 0.2 ? "#101418" : "#ffffff");

// Current colors and fonts of the page, resolved for a canvas.
export function styleOf(root, context, theme) {
  const css = getComputedStyle(root);
  const [fg, bg, muted] = ["--dk-fg", "--dk-bg", "--dk-muted"].map((name) => {
    context.fillStyle = css.getPropertyValue(name).trim();
    return context.fillStyle;
  });
  const dark = luminance(bg) < 0.25;
  return {
    fg, bg, muted, dark, font: css.fontFamily, soft: alpha(fg, 0.75),
    lane: alpha(fg, dark ? 0.055 : 0.035),
    grid: alpha(fg, 0.07), hairline: alpha(fg, 0.3),
    ...theme[dark ? "dark" : "light"],
  };
}

// The kind of marked computation, as in work_kind of theme.py.
export function workKind(label = "") {
  const kind = label.match(/^(?:([FBIW])\d*$|(forward|backward))/);
  return kind ? kind[1] ?? kind[2][0].toUpperCase() : "";
}

// Sets the colors of a view's style sheet that depend on the theme.
export function applyTheme(root, { ranks, traces, work, warning, values }) {
  const put = (name, color) => root.style.setProperty(`--dk-${name}`, color);
  ranks.forEach((color, i) => {
    put(`r${i}`, color);
    put(`i${i}`, readable(color));
  });
  traces.forEach((color, i) => put(`t${i}`, color));
  for (const kind in work) put(`work${kind}`, work[kind]);
  put("rank", ranks[0]);
  put("warning", warning);
  for (const kind in values) put(kind, values[kind]);
}
