// A view that is a scene: its marks, played, with its beats in words, a list of some and what stands beside.

import { h, s } from "./dom.js";
import { clamp, humanSeconds } from "./numbers.js";
import { readable } from "./colors.js";
import { Marks } from "./marks.js";
import { Bar, Player } from "./player.js";
import { Script } from "./script.js";
import { Sheet } from "./tensorsparts.js";

const SPEEDS = [0.25, 0.5, 1, 2, 4, 16];
const [SHORT, LONG] = [70, 420]; // milliseconds between two ticks, at least and at most
const WHOLE = 40_000; // milliseconds of a run in which nothing is too short or too long
const [HIGH, LARGE] = [470, 1.4]; // a scene is at most so many pixels high, and so many times its size
const KEYS = " Space plays and pauses; arrow right and left go to the next and the previous message, " +
  "page down and page up along the list, Home and End to the ends.";

const order = d3.bisector((x) => x); // of sorted numbers

// Busy and idle stretches pass at a pace that lets every message be seen.
function pace({ beats, ends, start, end, last }) {
  const ticks = [...new Set([...beats.map(({ begin }) => begin), ...ends, start, last])].sort((a, b) => a - b);
  return (time, left) => {
    while (left > 0 && time < last) {
      const i = order.right(ticks, time);
      if (i >= ticks.length) return last;
      if (i < 1) return time;
      const gap = ticks[i] - ticks[i - 1];
      const lasts = clamp((gap / Math.max(end - start, 1e-12)) * WHOLE, SHORT, LONG);
      const need = ((ticks[i] - time) / gap) * lasts;
      time = need <= left ? ticks[i] : time + (gap * left) / lasts;
      left -= need;
    }
    return time;
  };
}

// Of what grows comes how much is as it was, and what follows; patch() in widget/scene.py.
function merged(old, patch) {
  if (!(patch instanceof Object) || Array.isArray(patch) || !old) return patch;
  if (patch.more && Array.isArray(old)) return [...old.slice(0, patch.keep), ...patch.more];
  return { ...old, ...Object.fromEntries(Object.entries(patch).map(([key, value]) => [key, merged(old[key], value)])) };
}

export class Scene extends Sheet {
  constructor(model, el) {
    const { view, title, beats } = model.get("picture");
    super(model, el, view, title + (beats.length ? `.${KEYS}` : ""));
    this.root.setAttribute("role", "group");
    this.root.tabIndex = 0;
  }

  build() {
    this.player = new Player(pace, (moving) => (moving ? this.paint() : this.later()), () => this.bar.tell(this.root));
    this.bar = new Bar(this.player, SPEEDS, 2000);
    [this.marks, this.side] = [new Marks("dkm-main"), new Marks("dkm-beside")];
    this.fact = h("p", { class: "dk-fact" });
    this.list = new List((beat) => this.player.go(beat));
    this.controls = h("div", { class: "dk-controls", role: "toolbar", "aria-label": "play" }, this.bar.buttons, this.fact, this.bar.clock);
    this.said = h("p", { class: "dk-said" });
    this.empty = h("p", { class: "dkv-empty" });
    this.field = h("div", { class: "dkm-field" }, this.marks.root, this.bar.scrub);
    this.column = h("div", { class: "dkm-column" }, this.list.root, this.side.root);
    this.all = h("div", { class: "distkit-stage dkm" },
      h("div", { class: "dkm-body" }, h("div", {}, this.field), this.column, this.controls));
    this.body.append(this.empty, this.said, this.all);
    this.root.addEventListener("keydown", (e) => this.bar.typed(e, { PageDown: () => this.along(1), PageUp: () => this.along(-1) }));
    this.load();
  }

  load() {
    const { picture, player } = this;
    const follow = this.script ? this.live && player.time >= this.script.end : picture.live;
    this.live = picture.live;
    this.script = new Script({ ...picture, changes: [], nodes: [] }, false);
    player.load(this.script, { opening: picture.opening, follow });
    const { scene, side, list, beats, styles, scale: [left, right] } = picture;
    this.marks.load(scene, styles);
    if (side) this.side.load(side, styles);
    this.list.load(list, this.script);
    this.field.style.maxWidth = `${scene.width * Math.min(HIGH / scene.height, LARGE)}px`;
    this.field.style.setProperty("--dk-left", left);
    this.field.style.setProperty("--dk-right", right);
    [this.bar.scrub.hidden, this.controls.hidden] = [!beats.length, !beats.length];
    this.column.hidden = !list && !side;
    this.tools.replaceChildren(...picture.legend.map(([shapes, width, words]) =>
      h("span", { class: "dkm-sign" }, s("svg", { width, height: 20, "aria-hidden": "true" }, ...shapes.map((shape) => this.marks.shape(shape))), words)));
  }

  merge(patch) {
    this.picture = merged(this.picture, patch);
    this.load();
  }

  // Everything, at rest.
  draw() {
    const { empty, said } = this.picture;
    [this.empty.hidden, this.all.hidden, this.tools.hidden] = [!empty, Boolean(empty), Boolean(empty)];
    this.empty.textContent = empty;
    this.said.textContent = empty ? "" : said;
    this.look.ranks.forEach((color, i) => {
      this.root.style.setProperty(`--dk-r${i}`, color);
      this.root.style.setProperty(`--dk-i${i}`, readable(color));
    });
    this.paint();
    this.list.mark(this.player.beat, true);
    const { who, more } = this.script.beats[this.player.beat] ?? {};
    this.spoken.textContent = [who, more, ...this.marks.aloud].filter(Boolean).join("; ");
  }

  // A moment.
  paint() {
    const { script, player, picture } = this;
    const { time, beat } = player;
    this.marks.draw(time, player.resting ? beat : -1);
    if (picture.side) this.side.draw(time, -1);
    const { who = "before the first message", more = "", where = "" } = script.beats[beat] ?? {};
    this.bar.show(humanSeconds(time - script.start), who);
    this.fact.replaceChildren(h("strong", {}, who), h("span", {}, [more, where].filter(Boolean).join(" · ")));
    this.list.mark(beat);
    this.root.dataset.beat = beat;
  }

  along(by) {
    this.player.go(this.list.beside(this.player.beat, by));
  }

  dispose() {
    this.player.pause();
    super.dispose();
  }
}

// Some of the beats as a list; the reader may choose a group of them.
class List {
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
    const shown = rows.filter(([, group]) => !only || group === only);
    const badge = ([lane, words, more]) => h("span", { class: "dkm-who", title: more },
      h("b", { style: `background:var(--dk-r${lane});color:var(--dk-i${lane})` }, words), more);
    this.list.replaceChildren(...shown.map(([beat, , key, part, value, who, others]) => h("li", { "data-beat": beat },
      h("span", { class: "dk-who" }, h("span", { class: "dk-code" }, key), h("small", {}, part), h("b", {}, ` ${value}`)),
      h("span", { class: "dk-when" }, humanSeconds(script.beats[beat].end - script.start)),
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
