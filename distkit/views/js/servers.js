// The parameter server in the browser: keys on their servers, gradients that gather, who waits for whom.

import { h } from "./dom.js";
import { clamp, humanSeconds } from "./numbers.js";
import { readable } from "./colors.js";
import { Bar, Player } from "./player.js";
import { Script } from "./script.js";
import { counters, Updates, Waiting } from "./serversparts.js";
import { Shelves } from "./serversscene.js";
import { Moments, order } from "./serversstate.js";
import { Sheet } from "./tensorsparts.js";

const SPEEDS = [0.25, 0.5, 1, 2, 4, 16];
const [SHORT, LONG] = [70, 420]; // milliseconds between two ticks, at least and at most
const WHOLE = 40_000; // milliseconds of a run in which nothing is too short or too long
const LEGEND = [["grad", "∇v1", "gradient computed from version 1"], ["pull", "", "pull"], ["wait", "", "pull that waits"],
  ["weights", "v1", "weights, version 1"], ["late", "2 late", "2 updates came in between"]];

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

export class Servers extends Sheet {
  constructor(model, el) {
    super(model, el, "servers", "Parameter server. Space plays and pauses; arrow right and left go to the next and the " +
      "previous message, page down and page up to the next and the previous update, Home and End to the ends.");
    this.root.setAttribute("role", "group");
    this.root.tabIndex = 0;
  }

  build() {
    this.player = new Player(pace, (moving) => (moving ? this.paint() : this.later()), () => this.bar.tell(this.root));
    this.bar = new Bar(this.player, SPEEDS, 2000);
    this.scene = new Shelves();
    this.fact = h("p", { class: "dk-fact" });
    this.legend = h("ul", { class: "dkp-legend", "aria-label": "legend" }, LEGEND.map(([kind, sign, words]) =>
      h("li", {}, h("i", { class: `dkp-sign dkp-sign-${kind}`, "aria-hidden": "true" }, sign), words)));
    this.updates = new Updates((time) => this.player.go(this.script.at(time)));
    this.waiting = new Waiting(this.bar.scrub);
    this.controls = h("div", { class: "dk-controls", role: "toolbar", "aria-label": "play" },
      this.bar.buttons, this.bar.clock);
    this.sums = h("div", { class: "dk-sums" });
    this.said = h("p", { class: "dk-said" });
    this.empty = h("p", { class: "dkv-empty" });
    this.all = h("div", { class: "distkit-stage dkp" },
      h("div", { class: "dk-body" }, h("div", { class: "dk-scene" }, this.scene.root, this.fact, this.legend), this.updates.root),
      this.waiting.root, this.controls, this.sums);
    this.body.append(this.empty, this.said, this.all);
    this.root.addEventListener("keydown", (e) => this.typed(e));
    this.load();
  }

  load() {
    const { picture, player } = this;
    const follow = this.script ? this.live && player.time >= this.script.end : picture.live;
    this.live = picture.live;
    for (const beat of picture.beats) this.complete(beat);
    this.script = new Script({ ...picture, changes: [], nodes: [] }, false);
    this.moments = new Moments(picture, this.script);
    player.load(this.script, { opening: picture.opening, follow });
    this.scene.load(picture);
    this.updates.load(picture);
    this.waiting.load(picture, this.moments);
  }

  // Where a gradient lies, and whose an update takes, as the painter needs it.
  complete(beat) {
    const { gradients, updates } = this.picture;
    if (beat.kind === "push") {
      this.slots ??= new Map();
      if (this.slots.of !== gradients) this.slots = Object.assign(new Map(gradients.map((g) => [`${g[0]} ${g[1]} ${g[2]}`, g[4]])), { of: gradients });
      beat.slot = this.slots.get(`${beat.row} ${beat.src} ${beat.end}`) ?? 0;
    } else if (beat.kind === "update") {
      this.late ??= new Map();
      if (this.late.of !== updates) this.late = Object.assign(new Map(updates.map((u) => [`${u[0]} ${u[2]}`, u[4]])), { of: updates });
      beat.late = this.late.get(`${beat.row} ${beat.begin}`) ?? [];
    }
  }

  merge(patch) {
    const whole = Object.entries(patch).map(([name, value]) =>
      [name, value?.more ? [...this.picture[name].slice(0, value.keep), ...value.more] : value]);
    this.picture = { ...this.picture, ...Object.fromEntries(whole) };
    this.load();
  }

  // Everything, at rest.
  draw() {
    const { picture } = this;
    const nothing = !picture.beats.length && !picture.cards.length;
    [this.empty.hidden, this.all.hidden] = [!nothing, nothing];
    this.empty.textContent = picture.live ? "waiting for the first message to a server"
      : "this trace has no requests to a parameter server";
    if (nothing) return;
    this.look.ranks.forEach((color, i) => {
      this.root.style.setProperty(`--dk-r${i}`, color);
      this.root.style.setProperty(`--dk-i${i}`, readable(color));
    });
    this.said.textContent = picture.said;
    this.paint();
    this.updates.mark(this.player.time, true);
    const { who, more } = this.script.beats[this.player.beat] ?? {};
    const waits = [...this.state.status].filter(([, { kind }]) => kind === "waits")
      .map(([node, { text }]) => `${this.scene.people.get(node)?.name ?? `rank ${node}`} ${text}`);
    this.spoken.textContent = [who, more, ...waits].filter(Boolean).join("; ");
  }

  // A moment of the run.
  paint() {
    const { script, player, picture } = this;
    if (!this.look) return;
    const { time, beat } = player;
    this.state = this.moments.at(time);
    this.scene.draw(time, script, this.state, player.resting ? beat : -1);
    const { who = "before the first message", more = "", where = "" } = script.beats[beat] ?? {};
    this.bar.show(humanSeconds(time - script.start), who);
    this.fact.replaceChildren(h("strong", {}, who), h("span", {}, [more, where].filter(Boolean).join(" · ")));
    this.updates.mark(time);
    this.waiting.draw(script, this.look, this.scene.lanes, time);
    this.sums.replaceChildren(...counters(this.moments.counts(time), picture.staleness));
    this.root.dataset.beat = beat;
  }

  typed(e) {
    const { player, script } = this;
    const update = (by) => player.go(script.at(this.updates.beside(player.time, by)));
    this.bar.typed(e, { PageDown: () => update(1), PageUp: () => update(-1) });
  }

  dispose() {
    this.player.pause();
    super.dispose();
  }
}
