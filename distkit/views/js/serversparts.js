// Around the picture of a parameter server: updates, counters, who waited when.

import { h, s } from "./dom.js";
import { clamp, humanBytes, humanSeconds, plural } from "./numbers.js";
import { order } from "./serversstate.js";

const NAMED = 8; // workers of an update that are drawn
const LANES = 8; // workers whose waiting is drawn
const [BAR, PITCH] = [7, 12];

const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
const badge = (rank, lane, late) => h("span", { class: "dkp-who", title: late ? `${late} late` : "" },
  h("b", { style: `background:var(--dk-r${lane % 8});color:var(--dk-i${lane % 8})` }, String(rank)), late ? `${late} late` : "");

// The updates as a list; the reader may choose a key.
export class Updates {
  constructor(go) {
    this.select = h("select", { class: "dkv-select", "aria-label": "key" });
    this.list = h("ol", { class: "dk-beats dkp-updates", "aria-label": "updates" });
    this.root = h("div", { class: "dkp-side" }, h("div", { class: "dkp-sidehead" }, h("h4", {}, "updates"), this.select), this.list);
    this.select.addEventListener("change", () => this.#fill());
    this.list.addEventListener("click", (e) => {
      const row = e.target.closest("li[data-at]");
      if (row) go(Number(row.dataset.at));
    });
  }

  load(picture) {
    const { updates, rows } = picture;
    const said = updates.length && JSON.stringify([updates.length, updates.at(-1)]);
    if (said === this.said) return;
    Object.assign(this, { picture, said });
    const keys = [...new Set(rows.map(({ key }) => key))];
    const chosen = this.select.value;
    this.select.replaceChildren(h("option", { value: "" }, "all keys"), ...keys.map((key) => h("option", { value: key }, key)));
    this.select.value = keys.includes(chosen) ? chosen : "";
    this.select.hidden = keys.length < 2;
    this.#fill();
  }

  #fill() {
    const { updates, rows, lanes, start } = this.picture;
    const lane = new Map(lanes.map(([rank, i]) => [rank, i]));
    const only = this.select.value;
    this.shown = updates.map((u, i) => [u, i]).filter(([[row, , , end]]) => end !== null && end >= start && (!only || rows[row].key === only));
    this.list.replaceChildren(...this.shown.map(([[row, version, , end, late]]) => {
      const { key, part } = rows[row];
      const who = late.slice(0, NAMED).map(([rank, n]) => badge(rank, lane.get(rank) ?? 7, n));
      return h("li", { "data-at": end },
        h("span", { class: "dk-who" }, h("span", { class: "dk-code" }, key), part ? h("small", {}, ` ${part[0]}/${part[1]}`) : "", h("b", {}, ` v${version}`)),
        h("span", { class: "dk-when" }, humanSeconds(end - start)),
        h("span", { class: "dk-what" }, who, late.length > NAMED ? `and ${late.length - NAMED} more` : ""));
    }), ...(this.shown.length ? [] : [h("li", { class: "dkp-none" }, "none yet")]));
    this.ends = this.shown.map(([[, , , end]]) => end);
    this.marked = undefined;
    this.mark(this.time ?? start);
  }

  // anew: the page may have another size.
  mark(time, anew = false) {
    this.time = time;
    const now = order.right(this.ends, time) - 1;
    if (now === this.marked && !anew) return;
    this.list.children[this.marked]?.removeAttribute("aria-current");
    this.marked = now;
    const row = this.list.children[now];
    if (!row) this.list.scrollTop = 0;
    if (!row || !this.shown.length) return;
    row.setAttribute("aria-current", "step");
    const { offsetTop: top, offsetHeight: height } = row;
    const { scrollTop, clientHeight } = this.list;
    if (top < scrollTop + height || top > scrollTop + clientHeight - 2 * height) this.list.scrollTop = top - clientHeight / 2;
  }

  // The end of the next or the previous update of the chosen key.
  beside(time, by) {
    const i = by > 0 ? order.right(this.ends, time) : order.left(this.ends, time) - 1;
    return this.ends[clamp(i, 0, this.ends.length - 1)] ?? time;
  }
}

// Counters, and how stale the gradients were.
export function counters({ pushes, pulls, updates, there, back, late }, staleness) {
  const tile = (value, label, detail) => h("div", { class: "dk-tile" }, h("b", {}, value), h("span", {}, detail ? `${label} · ${detail}` : label));
  const noun = (n, word) => plural(n, word).replace(/^\S+ /, "");
  return [tile(pushes.toLocaleString("en"), noun(pushes, "push").replace("pushs", "pushes"), humanBytes(there)),
    tile(pulls.toLocaleString("en"), noun(pulls, "pull"), humanBytes(back)),
    tile(updates.toLocaleString("en"), noun(updates, "update")), staleBars(staleness, late)];
}

// The bins are made in Python, for the whole run; counts: of the gradients until now.
function staleBars({ labels, totals, pitch, room, high, axis }, counts) {
  const most = Math.max(1, ...totals);
  const base = high + 33;
  const words = (x, y, text, kind) => s("text", { x, y, class: kind }, text);
  const bars = labels.map((label, i) => {
    const [n, middle] = [counts[i], (i + 0.5) * pitch];
    const tall = n ? Math.max(2, (high * n) / most) : 0;
    return s("g", { class: "dkp-bar" }, s("title", {}, `${plural(n, "gradient")} of staleness ${label}`),
      s("rect", { x: i * pitch + 1, y: base - tall, width: pitch - 2, height: tall, rx: 1, class: i ? "dkp-stale" : "" }),
      words(middle, base - tall - 4, n ? n.toLocaleString("en") : "", "dkp-count"), words(middle, base + 14, label, "dkp-tick"));
  });
  const told = labels.map((label, i) => counts[i] && `${label}: ${counts[i].toLocaleString("en")}`).filter(Boolean).join(", ");
  return s("svg", { class: "dkp-staleness", viewBox: `0 0 ${room} ${base + 37}`, width: room, role: "img",
    "aria-label": told ? `gradients of staleness ${told}` : "no gradient applied yet" },
  words(0, 11, told ? "gradients" : "no gradient applied yet", ""),
  s("path", { d: `M0 ${base}H${pitch * labels.length}` }), ...bars, words(0, base + 32, axis, ""));
}

// One bar per worker over the whole run: full while it waits for others, pale while it computes.
export class Waiting {
  constructor(scrub) {
    this.canvas = h("canvas", { class: "dkp-waits", "aria-hidden": "true" });
    this.names = h("div", { class: "dkp-wait-names" });
    this.parts = h("div", { class: "dkp-wait-parts" });
    this.root = h("div", { class: "dkp-waiting-row" }, this.names, this.canvas, this.parts, scrub);
  }

  load(picture, moments) {
    const workers = picture.workers.slice(0, LANES);
    this.lanes = workers.map(({ rank, name }) => {
      const stretches = moments.stretches(rank);
      const waits = sum(stretches.filter(([kind]) => kind === "waits").map(([, begin, end]) => end - Math.max(begin, picture.start)));
      return { rank, name, stretches, part: waits / Math.max(picture.end - picture.start, 1e-12) };
    });
    const line = (words) => h("div", { style: `height:${PITCH}px` }, words);
    this.names.replaceChildren(...this.lanes.map(({ name }) => line(name)));
    this.parts.replaceChildren(...this.lanes.map(({ part }) => line(`waits ${Math.round(100 * part)} %`)));
  }

  draw(script, look, lanes, time) {
    const { canvas } = this;
    const [width, height, ratio] = [canvas.clientWidth, PITCH * this.lanes.length, devicePixelRatio || 1];
    if (!width || !height) return;
    canvas.style.height = `${height}px`;
    [canvas.width, canvas.height] = [width * ratio, height * ratio];
    const c = canvas.getContext("2d");
    c.scale(ratio, ratio);
    const x = d3.scaleLinear([script.start, Math.max(script.end, script.start + 1e-9)], [8, width - 8]).clamp(true);
    this.lanes.forEach(({ rank, stretches }, i) => {
      const top = i * PITCH + (PITCH - BAR) / 2;
      c.fillStyle = look.ranks[(lanes.get(rank) ?? 7) % look.ranks.length];
      for (const [kind, begin, end] of stretches) {
        c.globalAlpha = kind === "waits" ? 1 : 0.22;
        c.fillRect(x(begin), top, Math.max(x(end) - x(begin), 0.6), BAR);
      }
    });
    c.globalAlpha = 1;
    c.fillStyle = look.fg;
    c.fillRect(x(time) - 0.75, 0, 1.5, height);
  }
}
