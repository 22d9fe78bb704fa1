// Elements next to a scene: panels of moments, and a list of keyframes.

import { h } from "./dom.js";
import { Marks } from "./marks.js";
import { clamp, humanSeconds } from "./numbers.js";
import { d3 } from "./vendor/d3.js";

export const bisect = d3.bisector((x) => x); // bisection of sorted numbers

// Whether time is counted in units instead of seconds.
export const counted = (unit) => unit !== "";

// The next or previous keyframe of a sorted list.
export function nextKeyframe(keyframes, keyframe, by) {
  const i = by > 0 ? bisect.right(keyframes, keyframe) : bisect.left(keyframes, keyframe) - 1;
  return keyframes[clamp(i, 0, keyframes.length - 1)] ?? keyframe;
}

// Marks the list element of the latest keyframe; returns the element, and whether it has changed.
function mark(view, keyframe) {
  const now = bisect.right(view.keyframes, keyframe) - 1;
  const moved = now !== view.marked;
  const { children } = view.list;
  if (moved) {
    children[view.marked]?.removeAttribute("aria-current");
    children[now]?.setAttribute("aria-current", "step");
  }
  view.marked = now;
  return [children[now], moved];
}

const onKeyframe = (go) => ({ target }) => {
  const { keyframe } = target.closest("[data-keyframe]")?.dataset ?? {};
  if (keyframe !== undefined) go(Number(keyframe));
};

// Small pictures of key moments.
export class Panels {
  constructor(go) {
    Object.assign(this, { marks: [], keyframes: [] });
    this.root = this.list = h("ol",
      { class: "dkm-panels", "aria-label": "moments", onclick: onKeyframe(go) });
  }

  load({ panels, scene, styles, keyframes, end }) {
    this.root.hidden = !panels.length;
    this.keyframes = panels.map(([keyframe]) => keyframe);
    this.marks = panels.map(([keyframe]) => {
      const marks = new Marks("dkm-small");
      marks.load(scene, styles);
      marks.draw(keyframe < 0 ? 0 : keyframes[keyframe].end ?? end, keyframe);
      return marks;
    });
    this.root.replaceChildren(...panels.map(([keyframe, title, when], i) =>
      h("li", {}, h("button", { type: "button", "data-keyframe": keyframe },
        h("span", {}, h("b", {}, title), h("small", {}, when)), this.marks[i].root))));
    this.marked = undefined;
  }

  mark(keyframe) {
    mark(this, keyframe);
  }
}

// A list of keyframes, which the user can filter by group.
export class List {
  constructor(go) {
    this.name = h("h4");
    this.select = h("select",
      { class: "dkv-select", "aria-label": "filter", onchange: () => this.#filter(go) });
    this.list = h("ol", { class: "dk-keyframes", onclick: onKeyframe(go) });
    this.root = h("div", { class: "dkm-list" },
      h("div", { class: "dkm-listhead" }, this.name, this.select), this.list);
  }

  load(list, script) {
    this.root.hidden = !list;
    const { name = "", all = "", rows = [] } = list ?? {};
    const key = JSON.stringify([rows.length, rows.at(-1)]);
    if (key === this.key) return;
    Object.assign(this, { rows, script, key });
    this.name.textContent = name;
    const groups = [...new Set(rows.flatMap(([, names]) => names))].sort((a, b) =>
      a.localeCompare(b, undefined, { numeric: true }));
    const chosen = this.select.value;
    this.select.replaceChildren(h("option", { value: "" }, all),
      ...groups.map((group) => h("option", { value: group }, group)));
    this.select.value = groups.includes(chosen) ? chosen : "";
    this.select.hidden = groups.length < 2;
    this.#fill();
  }

  // Shows the rows of a group, and the latest of them, if the moment shown is not one.
  #filter(go) {
    this.#fill();
    const latest = this.keyframes[Math.max(0, this.marked)];
    if (latest !== undefined && latest !== this.keyframe) go(latest);
  }

  #fill() {
    const { rows, select: { value: only } } = this;
    const shown = rows.filter(([, names]) => !only || [names].flat().includes(only));
    const none = h("li", { class: "dkm-none" }, "none yet");
    this.list.replaceChildren(...shown.length ? shown.map((row) => this.#row(row)) : [none]);
    this.keyframes = shown.map(([keyframe]) => keyframe);
    this.marked = undefined;
    this.mark(this.keyframe ?? -1);
  }

  #row([keyframe, , key, part, value, ranks, others]) {
    const { keyframes, unit } = this.script;
    const { end } = keyframes[keyframe];
    const when = end === null ? "never" : counted(unit) ? "" : humanSeconds(end);
    const badge = ([lane, words, more]) => h("span", { class: "dkm-who", title: more },
      h("b", { style: `background:var(--dk-r${lane});color:var(--dk-i${lane})` }, words), more);
    return h("li", { "data-keyframe": keyframe },
      h("span", { class: "dk-who" },
        h("span", { class: "dk-code" }, key), h("small", {}, part), h("b", {}, ` ${value}`)),
      h("span", { class: "dk-when" }, when),
      h("span", { class: "dk-what" }, ranks.map(badge), others ? `and ${others} more` : ""));
  }

  // redraw: scroll to the keyframe even if it has not changed, because the page may have been resized.
  mark(keyframe, redraw = false) {
    this.keyframe = keyframe;
    const [row, moved] = mark(this, keyframe);
    if (!moved && !redraw) return;
    if (this.marked < 0) this.list.scrollTop = 0;
    if (!row) return;
    const { offsetTop: top, offsetHeight: height } = row;
    const { scrollTop, clientHeight } = this.list;
    const isVisible = top >= scrollTop + height && top <= scrollTop + clientHeight - 2 * height;
    if (!isVisible) this.list.scrollTop = top - clientHeight / 2;
  }
}
