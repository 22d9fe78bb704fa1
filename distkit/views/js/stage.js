// The stage in the browser: plays a run along the links between its ranks, in trace time.

import { h } from "./dom.js";
import { clamp } from "./numbers.js";
import { brightness, readable } from "./colors.js";
import { Bar, Player } from "./player.js";
import { onTheme } from "./repaint.js";
import { Scene } from "./stagescene.js";
import { Script, words } from "./script.js";
import { unfold } from "./unfold.js";

const SPEEDS = [0.25, 0.5, 1, 2, 4];
const BEAT = 1200; // milliseconds of a round at speed 1
const LONGEST = 90_000; // milliseconds of a whole run at speed 1
const IDLE = 350; // milliseconds at most in which nothing is under way
const KEYS = "Space plays and pauses; arrow right and left go to the next and the previous message, " +
  "page down and page up to the next and the previous round, Home and End to the ends; " +
  "v switches between contributions and values.";

// All of a run in a time that its rounds give, and no long wait for what comes next.
function pace(script) {
  const { start, end, rounds, last } = script;
  const rate = Math.max(end - start, 1e-9) / clamp(rounds * BEAT, BEAT, LONGEST); // of the trace's time per millisecond
  return (time, elapsed) => {
    const next = script.wakes(time);
    const from = next - time > IDLE * rate ? next - IDLE * rate : time;
    return Math.min(from + elapsed * rate, last);
  };
}

export class Stage {
  constructor(model, el) {
    const picture = model.get("picture");
    Object.assign(this, { model, theme: picture.theme, next: picture.next ?? 0 });
    this.#build(el);
    this.#listen();
    this.#load(picture);
    this.#drain();
    this.root.dataset.stage = "ready";
  }

  // -- what is on the page ----------------------------------------------------------

  #build(el) {
    this.player = new Player(pace, () => this.#draw(), () => this.bar.tell(this.root));
    this.bar = new Bar(this.player, SPEEDS, 1000);
    this.head = h("div", { class: "dk-head" });
    this.notices = h("ul", { class: "dk-notices" });
    this.mode = h("div", { class: "dk-mode", role: "group", "aria-label": "what the strips show" },
      ["contributions", "values"].map((name) => {
        const b = h("button", { type: "button", "data-mode": name }, name);
        b.addEventListener("click", () => this.#show(name));
        return b;
      }));
    this.clocks = h("div", { class: "dk-mode dk-clocks", role: "group", "aria-label": "what time is" },
      ["time", "rounds"].map((name) => {
        const b = h("button", { type: "button", "data-clock": name }, name);
        b.addEventListener("click", () => this.#wind(name));
        return b;
      }));
    this.controls = h("div", { class: "dk-controls", role: "toolbar", "aria-label": "play" },
      this.bar.buttons, this.bar.scrub, this.bar.clock, this.clocks);
    this.scene = new Scene();
    this.fact = h("p", { class: "dk-fact", "aria-live": "polite" });
    this.list = h("ol", { class: "dk-beats", "aria-label": "messages" });
    this.said = h("p", { class: "dk-said" });
    this.body = h("div", { class: "dk-body" }, h("div", { class: "dk-scene" }, this.scene.root, this.fact), this.list);
    this.root = h("figure", { class: "distkit-stage", tabindex: 0, role: "group" },
      h("header", {}, this.head, this.mode), this.notices, this.body, this.controls, this.said);
    el.append(this.root);
  }

  #listen() {
    this.stop = new AbortController();
    const { signal } = this.stop;
    this.changed = () => this.#drain();
    this.model.on("change", this.changed);
    const on = (target, name, act) => target.addEventListener(name, act, { signal });
    on(this.root, "keydown", (e) => this.#typed(e));
    on(this.root, "transitionend", (e) => e.target === this.root && this.#look());
    onTheme(() => this.#look(), signal);
    this.resized = new ResizeObserver(() => this.#look()); // it may have been off the page
    this.resized.observe(this.root);
    on(this.list, "click", (e) => {
      const row = e.target.closest("li");
      if (row) this.player.go(Number(row.dataset.beat));
    });
  }

  // Colours as the page has them now.
  #look() {
    const canvas = document.createElement("canvas").getContext("2d");
    canvas.fillStyle = "#ffffff"; // where nothing has a style yet
    canvas.fillStyle = getComputedStyle(this.root).getPropertyValue("--dk-bg").trim();
    const look = this.theme[brightness(canvas.fillStyle) < 128 ? "dark" : "light"];
    look.ranks.forEach((color, i) => {
      this.root.style.setProperty(`--dk-r${i}`, color);
      this.root.style.setProperty(`--dk-i${i}`, readable(color));
    });
    this.root.style.setProperty("--dk-warning", look.warning);
    this.scene.look(look.ranks, canvas.fillStyle);
    if (this.script) this.#draw(true);
  }

  // -- the run ----------------------------------------------------------------------------

  #drain() {
    let patch, latest = null;
    while ((patch = this.model.get(`patch${this.next}`))) {
      latest = patch;
      this.next += 1;
    }
    if (latest) this.#load(latest);
  }

  #load(told) {
    const picture = unfold(told);
    const follows = !this.script || (this.picture.live && this.player.time >= this.script.end);
    this.picture = picture;
    this.ticks ??= picture.clock ?? "time";
    this.script = new Script(picture, this.ticks === "rounds");
    for (const b of this.clocks.children) b.setAttribute("aria-pressed", String(b.dataset.clock === this.ticks));
    const { opening } = this.script;
    this.player.load(this.script, { opening, home: opening, follow: follows && picture.live });
    this.scene.load(picture, this.script);
    this.#words();
    this.#rows();
    this.#show(picture.known ? this.scene.mode ?? "contributions" : "values");
    this.#look();
  }

  // Another clock: the run begins anew.
  #wind(ticks) {
    if (ticks === this.ticks) return;
    this.player.pause();
    Object.assign(this.player, { chosen: null, time: undefined });
    this.ticks = ticks;
    this.#load(this.picture);
  }

  #words() {
    const { title, facts, live, notices, said, known, beats } = this.picture;
    this.head.replaceChildren(h("strong", {}, title || "Stage"), h("span", { class: "dk-facts" }, facts.join(" · ")),
      ...(live ? [h("span", { class: "dk-live" }, "live")] : []));
    this.notices.replaceChildren(...notices.map((text) => h("li", {}, text)));
    this.said.textContent = said;
    this.mode.hidden = !known;
    this.controls.hidden = !beats.length;
    this.list.hidden = !beats.length;
    this.root.setAttribute("aria-label", `Stage. ${[title, ...facts, ...notices].join(", ")}. ${beats.length} messages ` +
      `and collectives. ${said} ${KEYS}`);
  }

  #rows() {
    this.list.replaceChildren(...this.script.beats.map((beat, i) => {
      const { who, what, when } = words(beat, this.script);
      return h("li", { "data-beat": i },
        h("i", { class: "dk-dot", style: `background:var(--dk-r${this.script.lane(beat.src ?? beat.root) % 8})`,
          ...(beat.src ?? beat.root) === undefined || (beat.src ?? beat.root) === null ? { class: "dk-dot dk-all" } : {} }),
        h("span", { class: "dk-who" }, who), h("span", { class: "dk-what" }, what), h("span", { class: "dk-when" }, when));
    }));
    this.marked = undefined;
  }

  // -- drawing -------------------------------------------------------------------------------

  #show(mode) {
    this.scene.mode = mode;
    for (const b of this.mode.children) b.setAttribute("aria-pressed", String(b.dataset.mode === mode));
    this.#draw(true);
  }

  #draw(anew = false) {
    const { script, player: { time, beat: now, resting } } = this;
    this.scene.draw(time, { anew, resting: resting ? now : -1 });
    this.bar.show(script.says(time));
    if (now !== this.marked) this.#mark(now);
    this.root.dataset.beat = now;
  }

  #mark(now) {
    this.list.children[this.marked]?.removeAttribute("aria-current");
    this.marked = now;
    const row = this.list.children[now];
    this.fact.replaceChildren(...this.script.told(now));
    if (!row) return;
    row.setAttribute("aria-current", "step");
    const { offsetTop: top, offsetHeight: height } = row;
    const { scrollTop, clientHeight } = this.list;
    if (top < scrollTop + height || top > scrollTop + clientHeight - 2 * height) {
      this.list.scrollTop = top - clientHeight / 2;
    }
  }

  // -- the reader ------------------------------------------------------------------------------

  #typed(e) {
    this.bar.typed(e, {
      PageDown: () => this.#round(1), PageUp: () => this.#round(-1),
      v: () => this.picture.known && this.#show(this.scene.mode === "values" ? "contributions" : "values"),
    });
  }

  // To the next round, or the one before; after the last there is none.
  #round(by) {
    const { player, script } = this;
    const to = script.round(player.target ?? player.beat, by);
    if (to >= 0 || by < 0) player.go(to);
  }

  dispose() {
    this.player.pause();
    this.stop.abort();
    this.resized.disconnect();
    this.model.off("change", this.changed);
    this.root.remove();
  }
}
