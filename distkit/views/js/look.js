// Colours and fonts as the page has them now; a canvas wants them resolved.

import { alpha, brightness } from "./colors.js";

export function lookOf(root, context, theme) {
  const css = getComputedStyle(root);
  const resolve = (name) => {
    context.fillStyle = css.getPropertyValue(name).trim();
    return context.fillStyle;
  };
  const [fg, bg] = [resolve("--dk-fg"), resolve("--dk-bg")];
  const dark = brightness(bg) < 128;
  return {
    fg, bg, muted: resolve("--dk-muted"), font: css.fontFamily, soft: alpha(fg, 0.75),
    lane: alpha(fg, dark ? 0.055 : 0.035), mark: alpha(fg, dark ? 0.13 : 0.09),
    grid: alpha(fg, 0.07), hairline: alpha(fg, 0.3), ...theme[dark ? "dark" : "light"],
  };
}
