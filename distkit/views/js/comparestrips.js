// A rank of one of several traces as a strip, as compare/static.py draws it: dark where it
// communicated, pale where it waited for others, and its marked computation as a line.

import { alpha } from "./colors.js";
import { h } from "./dom.js";
import { clamp } from "./numbers.js";
import { add } from "./strips.js";
import { d3 } from "./vendor/d3.js";

const [SOME, MUCH, HALF] = [0.02, 0.3, 0.5]; // parts of a pixel
const LINE = 4; // pixels: how high computation is
const [PALE, FAINT] = [0.36, 0.62]; // how strong waiting is, and what fills half a pixel

// Of each pixel the parts in which a rank computed, communicated and waited.
// over: since when it only waited for the others' end [s]; light: what counts, null for all.
function covers(at, rank, over, light) {
  const { store } = at;
  const now = store.frame.live ? at.now : store.frame.end;
  const width = Math.ceil(at.right - at.left);
  const [work, talk, wait] = [0, 1, 2].map(() => new Float32Array(width));
  const put = (cover, from, to) => {
    const [x, end] = [from, to].map((time) => clamp(at.x(time) - at.left, 0, width));
    if (to > from) add(cover, x, Math.max(end - x, 0.25), 1);
  };
  for (const track of store.tracks) {
    if (track.rank !== rank) continue;
    const [first, last] = at.inSight(track);
    for (const i of track.items.slice(first, last)) {
      const ready = light?.bars.has(i) === false ? light.ends?.get(i) : 0;
      if (ready === undefined || store.paused(i)) continue;
      const [start, end] = [store.start[i] + ready, store.until(i, now)];
      const ended = start > over - 1e-6 && store.looks[store.look[i]].op === "barrier";
      if (!ended) put(track.mark ? work : talk, start, end);
      const [since, seconds] = store.causes?.waits.get(i) ?? [0, 0];
      put(wait, Math.max(start, store.start[i] + since), store.start[i] + since + seconds);
    }
  }
  return [work, talk.map((part, p) => Math.min(part, 1 + wait[p]) - wait[p]), wait];
}

// What the colours mean, of those that there are.
export function keys(stores, kinds) {
  const waits = stores.some(({ causes }) => causes?.waits.size);
  return [["dk-send", "communication", true], ["dkc-pale", "waiting for others", waits],
    ["dkc-line", "marked computation", kinds.has("mark")]].filter(([, , some]) => some)
    .map(([kind, words]) => h("li", {}, h("i", { class: `dk-key ${kind}` }), words));
}

// light: what is bright, null for all.
export function strip(c, at, rank, [top, height], { color, look, over, light }) {
  const tint = d3.interpolateRgb(look.bg, color);
  const looks = [[alpha(look.fg, 0.25), LINE], [tint(PALE), height], [tint(FAINT), height],
    [color, height]];
  const draw = (only, opacity) => {
    const [work, talk, wait] = covers(at, rank, over, only);
    const kind = (p) => (wait[p] > talk[p] && wait[p] >= SOME ? 1 : talk[p] >= HALF ? 3
      : talk[p] >= SOME ? 2 : work[p] >= MUCH ? 0 : -1);
    c.globalAlpha = opacity;
    for (let p = 0, from = 0; p < work.length; from = p) {
      const own = kind(p);
      while (p < work.length && kind(p) === own) p += 1;
      if (own < 0) continue;
      const [fill, tall] = looks[own];
      c.fillStyle = fill;
      c.fillRect(at.left + from, top + (height - tall) / 2, p - from, tall);
    }
  };
  draw(null, light ? 0.2 : 1);
  if (light) draw(light, 1);
  c.globalAlpha = 1;
}
