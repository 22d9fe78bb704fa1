// What stands around a scene: moments of it as small pictures, a list of beats, choices.

import { h } from "./dom.js";
import { Marks } from "./marks.js";
import { clamp, humanSeconds } from "./numbers.js";
import { d3 } from "./vendor/d3.js";

export const order = d3.bisector((x) => x); // of sorted numbers

// Buttons of which one is chosen; none where there is nothing to choose.
export class Choice {
  constructor(label, choose) {
    Object.assign(this, { choose, names: [], root: h("div", { class: "dkm-choice", role: "group", "aria-label": label }) });
    this.root.addEventListener("click", (e) => e.target.dataset.name && choose(e.target.dataset.name));
  }

  load(names, chosen) {
    if (names.join() !== this.names.join()) // a button may have the focus
      this.root.replaceChildren(...names.map((name) => h("button", { type: "button", "data-name": name }, name)));
    for (const b of this.root.children) b.setAttribute("aria-pressed", String(b.dataset.name === chosen));
    Object.assign(this, { names, chosen });
    this.root.hidden = names.length < 2;
  }

  next() {
    const { names, chosen } = this;
    if (names.length > 1) this.choose(names[(names.indexOf(chosen) + 1) % names.length]);
  }
}

// Moments that tell the story, drawn small.
export class Panels {
  constructor(go) {
    Object.assign(this, { marks: [], beats: [], root: h("ol", { class: "dkm-panels", "aria-label": "moments" }) });
    this.root.addEventListener("click", (e) => {
      const { beat } = e.target.closest("[data-beat]")?.dataset ?? {};
      if (beat !== undefined) go(Number(beat));
    });
  }

  load({ panels, scene, styles, beats, home, end }) {
    this.root.hidden = !panels.length;
    this.beats = panels.map(([beat]) => beat);
    this.marks = panels.map(() => new Marks("dkm-small"));
    this.root.replaceChildren(...panels.map(([beat, title, when], i) => {
      this.marks[i].load(scene, styles);
      this.marks[i].draw(beat < 0 ? home : beats[beat].end ?? end, beat);
      return h("li", {}, h("button", { type: "button", "data-beat": beat },
        h("span", {}, h("b", {}, title), h("small", {}, when)), this.marks[i].root));
    }));
    this.marked = undefined;
  }

  mark(beat) {
    const now = order.right(this.beats, beat) - 1;
    if (now === this.marked) return;
    this.root.children[this.marked]?.removeAttribute("aria-current");
    this.root.children[now]?.setAttribute("aria-current", "step");
    this.marked = now;
  }

  // The beat of the next or the previous moment.
  beside(beat, by) {
    const now = by > 0 ? order.right(this.beats, beat) : order.left(this.beats, beat) - 1;
    return this.beats[clamp(now, 0, this.beats.length - 1)] ?? beat;
  }
}

// Some of the beats as a list; the reader may choose a group of them.
export class List {
  constructor(go) {
    this.name = h("h4");
    this.select = h("select", { class: "dkv-select", "aria-label": "which" });
    this.list = h("ol", { class: "dk-beats" });
    this.root = h("div", { class: "dkm-list" }, h("div", { class: "dkm-listhead" }, this.name, this.select), this.list);
    this.select.addEventListener("change", () => this.#fill());
    this.list.addEventListener("click", (e) => {
      const row = e.target.closest("li[data-beat]");
      if (row) go(Number(row.dataset.beat));
    });
  }

  load(list, script) {
    this.root.hidden = !list;
    const { name = "", all = "", rows = [] } = list ?? {};
    const said = JSON.stringify([rows.length, rows.at(-1)]);
    if (said === this.said) return;
    Object.assign(this, { rows, script, said });
    this.name.textContent = name;
    const groups = [...new Set(rows.map(([, group]) => group))];
    const chosen = this.select.value;
    this.select.replaceChildren(h("option", { value: "" }, all), ...groups.map((group) => h("option", { value: group }, group)));
    this.select.value = groups.includes(chosen) ? chosen : "";
    this.select.hidden = groups.length < 2;
    this.#fill();
  }

  #fill() {
    const { rows, script, select: { value: only } } = this;
    const when = (beat) => {
      const { end } = script.beats[beat];
      return end === null ? "never" : script.unit === "round" ? "" : humanSeconds(end);
    };
    const shown = rows.filter(([, group]) => !only || group === only);
    const badge = ([lane, words, more]) => h("span", { class: "dkm-who", title: more },
      h("b", { style: `background:var(--dk-r${lane});color:var(--dk-i${lane})` }, words), more);
    this.list.replaceChildren(...shown.map(([beat, , key, part, value, who, others]) => h("li", { "data-beat": beat },
      h("span", { class: "dk-who" }, h("span", { class: "dk-code" }, key), h("small", {}, part), h("b", {}, ` ${value}`)),
      h("span", { class: "dk-when" }, when(beat)),
      h("span", { class: "dk-what" }, who.map(badge), others ? `and ${others} more` : ""))), ...(shown.length ? [] : [h("li", { class: "dkm-none" }, "none yet")]));
    this.beats = shown.map(([beat]) => beat);
    this.marked = undefined;
    this.mark(this.beat ?? -1);
  }

  // anew: the page may have another size.
  mark(beat, anew = false) {
    this.beat = beat;
    const now = order.right(this.beats, beat) - 1;
    if (now === this.marked && !anew) return;
    this.list.children[this.marked]?.removeAttribute("aria-current");
    this.marked = now;
    if (now < 0) this.list.scrollTop = 0;
    const row = now < 0 ? null : this.list.children[now];
    if (!row) return;
    row.setAttribute("aria-current", "step");
    const { offsetTop: top, offsetHeight: height } = row;
    const { scrollTop, clientHeight } = this.list;
    if (top < scrollTop + height || top > scrollTop + clientHeight - 2 * height) this.list.scrollTop = top - clientHeight / 2;
  }

  // The next or the previous row's beat.
  beside(beat, by) {
    const i = by > 0 ? order.right(this.beats, beat) : order.left(this.beats, beat) - 1;
    return this.beats[clamp(i, 0, this.beats.length - 1)] ?? beat;
  }
}
