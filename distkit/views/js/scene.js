// A scene view: animated marks, keyframes as text, and panels next to them.

import { applyTheme, styleOf } from "./colors.js";
import { nextKeyframe, counted, List, bisect, Panels } from "./panels.js";
import { h, liveRegion, s } from "./dom.js";
import { Follower } from "./follower.js";
import { heading, notices } from "./frame.js";
import { Marks } from "./marks.js";
import { clamp, humanSeconds } from "./numbers.js";
import { Bar, Player, Script } from "./player.js";

const SPEEDS = [0.25, 0.5, 1, 2, 4, 16];
const [MIN_TICK, MAX_TICK] = [70, 420]; // minimum and maximum time between two ticks [ms]
const RUN_DURATION = 40_000; // duration of a run before these limits apply [ms]
const ROUND_DURATION = 1300; // maximum duration of a round [ms]
const MAX_DURATION = 90_000; // maximum duration of all rounds [ms]
const MAX_SCALE = 1.4; // maximum scale of a scene
const BESIDE_PANELS = 430; // maximum height of a scene next to panels [px]
const KEYS = " The space bar plays and pauses, the right and left arrow keys step forward and back, " +
  "Page Down and Page Up step through the list or panels, and Home and End go to the start and the end.";

// Returns a function that advances a time. It advances rounds at a constant speed, and seconds at a
// speed at which every message is visible.
export function pace({ unit, keyframes, ends, start, end, last }) {
  if (counted(unit)) {
    const speed = Math.max(1 / ROUND_DURATION, end / MAX_DURATION);
    return (time, remaining) => Math.min(time + remaining * speed, last);
  }
  const begins = keyframes.map(({ begin }) => begin);
  const ticks = [...new Set([...begins, ...ends, start, last])].sort((a, b) => a - b);
  return (time, remaining) => {
    while (remaining > 0 && time < last) {
      const i = bisect.right(ticks, time);
      if (i >= ticks.length) return last;
      if (i < 1) return time;
      const gap = ticks[i] - ticks[i - 1];
      const duration = clamp((gap / Math.max(end - start, 1e-12)) * RUN_DURATION, MIN_TICK, MAX_TICK);
      const needed = ((ticks[i] - time) / gap) * duration;
      time = needed <= remaining ? ticks[i] : time + (gap * remaining) / duration;
      remaining -= needed;
    }
    return time;
  };
}

const verdict = ({ word, text, expected }) =>
  h("li", { class: word === "same" ? "dkv-same" : expected ? "dkv-wrong" : null },
    h("b", { "aria-hidden": "true" }, word === "same" ? "=" : "≠"), h("span", {}, text));

export class Scene extends Follower {
  constructor(model, el) {
    const picture = model.get("picture");
    super(model);
    Object.assign(this, { picture, theme: picture.theme });
    this.scratch = h("canvas").getContext("2d");
    this.#build(el);
    this.load();
    this.watch();
    this.scheduleFrame();
  }

  #build(el) {
    const { view, title, keyframes } = this.picture;
    this.head = h("div", { class: "dk-head" });
    this.notices = h("ul", { class: "dk-notices" });
    this.liveRegion = liveRegion();
    const show = (moving) => (moving ? this.drawMoment() : this.scheduleFrame());
    this.player = new Player(pace, show, () => this.bar.showPlaying(this.root));
    this.bar = new Bar(this.player, SPEEDS, 2000);
    [this.marks, this.side] = [new Marks("dkm-main"), new Marks("dkm-beside")];
    this.verdicts = h("ul", { class: "dkv-verdicts" });
    this.fact = h("p", { class: "dk-fact" });
    this.list = new List((keyframe) => this.player.go(keyframe));
    this.panels = new Panels((keyframe) => this.player.go(keyframe));
    this.legend = h("div", { class: "dkm-legend" });
    this.controls = h("div", { class: "dk-controls", role: "toolbar", "aria-label": "playback" },
      this.bar.buttons, this.fact, this.bar.clock);
    this.description = h("p", { class: "dk-description" });
    this.empty = h("p", { class: "dkv-empty" });
    this.field = h("div", { class: "dkm-field" }, this.marks.root, this.bar.scrub);
    this.column = h("div", { class: "dkm-column" },
      this.panels.root, this.list.root, this.side.root);
    this.all = h("div", { class: "dkm" },
      h("div", { class: "dkm-body" }, h("div", {}, this.field), this.column, this.controls));
    this.tools = h("div", { class: "dkv-values-tools" }, this.legend);
    this.root = h("figure", { class: `distkit-timeline distkit-values distkit-${view}`,
      role: "group", tabindex: 0, "aria-label": title + (keyframes.length ? `.${KEYS}` : "") },
    h("header", {}, this.head, this.tools), this.notices,
    h("div", { class: "dkv-body" }, this.empty, this.verdicts, this.description, this.all),
    this.liveRegion);
    el.append(this.root);
    this.onKeys((e) => this.bar.onKey(e, {
      PageDown: () => this.stepList(1), PageUp: () => this.stepList(-1) }));
  }

  update(picture) {
    this.picture = picture;
    this.load();
  }

  load() {
    const { picture, player } = this;
    const follow = this.script ? this.live && player.time >= this.script.end : picture.live;
    this.live = picture.live;
    this.script = Object.assign(new Script(picture), { unit: picture.unit });
    player.load(this.script, { opening: picture.opening, follow });
    const { scene, side, list, keyframes, styles, scale: [left, right] } = picture;
    const { width, height } = scene;
    this.marks.load(scene, styles);
    this.side.root.toggleAttribute("hidden", !side);
    if (side) this.side.load(side, styles);
    this.list.load(list, this.script);
    const high = picture.panels.length ? BESIDE_PANELS : picture.max_height;
    const wide = `var(--dk-high, ${high}px) * ${width / height}`; // a page may set a lower height
    this.field.style.maxWidth = `min(${wide}, ${width * MAX_SCALE}px)`;
    this.field.style.setProperty("--dk-left", left);
    this.field.style.setProperty("--dk-right", right);
    [this.bar.scrub.hidden, this.controls.hidden] = [!keyframes.length, !keyframes.length];
    this.panels.load(picture);
    this.column.hidden = !list && !side && !picture.panels.length;
    this.column.dataset.panels = picture.panels.length;
    const sign = ([shapes, wide, words]) => h("span", { class: "dkm-sign" },
      s("svg", { width: wide, height: 20, "aria-hidden": "true" },
        ...shapes.map((shape) => this.marks.shape(shape))), words);
    this.legend.replaceChildren(...picture.legend.map(sign));
  }

  // Draws everything, without motion.
  frame() {
    if (!this.root.clientWidth) return; // not on the page yet, or hidden
    this.style = styleOf(this.root, this.scratch, this.theme);
    applyTheme(this.root, this.style);
    const { empty, description } = this.picture;
    this.head.replaceChildren(...heading(this.picture));
    this.notices.replaceChildren(...notices(this.picture));
    this.empty.hidden = !empty;
    this.all.hidden = this.tools.hidden = Boolean(empty);
    this.empty.textContent = empty;
    this.description.textContent = empty ? "" : description;
    this.drawMoment();
    this.list.mark(this.player.keyframe, true);
    const { caption, details, verdicts = [] } = this.script.keyframes[this.player.keyframe] ?? {};
    const words = [this.bar.clock.textContent, caption, details, ...verdicts.map(({ text }) => text),
      ...this.marks.screenReaderText, ...this.side.screenReaderText];
    this.liveRegion.textContent = words.filter(Boolean).join("; ");
    this.root.dataset.drawn = String((Number(this.root.dataset.drawn) || 0) + 1);
  }

  drawMoment() {
    const { script, player, picture } = this;
    const { time, keyframe } = player;
    const between = counted(script.unit) && time !== script.keyframes[keyframe]?.end; // within a round
    this.marks.draw(time, player.resting && !between ? keyframe : -1);
    if (picture.side) this.side.draw(time, -1);
    const shown = keyframe + (between && time > 0 && script.first !== 0 ? 1 : 0); // the round shown by the clock
    const { caption = picture.before, details = "", where = "", verdicts = [] } =
      script.keyframes[shown] ?? {};
    const nth = script.first === 0
      ? `${script.unit} ${keyframe + 1} of ${script.keyframes.length}`
      : time > 0 ? `${script.unit} ${Math.ceil(time)} of ${script.end}` : "start";
    this.bar.show(counted(script.unit) ? nth : humanSeconds(time), caption);
    const words = [details, where].filter(Boolean).join(" · ");
    this.fact.replaceChildren(h("strong", {}, caption), h("span", { title: words || null }, words));
    this.verdicts.replaceChildren(...[...picture.verdicts, ...verdicts].map(verdict));
    this.list.mark(keyframe);
    this.panels.mark(shown);
    this.root.dataset.keyframe = keyframe;
  }

  stepList(by) {
    const { list, panels, player } = this;
    const { keyframes } = list.root.hidden ? panels : list;
    player.go(nextKeyframe(keyframes, player.keyframe, by));
  }

  dispose() {
    this.player.pause();
    super.dispose();
  }
}
