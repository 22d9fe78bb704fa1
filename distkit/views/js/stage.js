// The stage in the browser: plays a run along the links between its ranks, in trace time.

import { h, still } from "./dom.js";
import { clamp } from "./numbers.js";
import { brightness, readable } from "./colors.js";
import { Scene } from "./scene.js";
import { Script, words } from "./script.js";
import { unfold } from "./unfold.js";

const SPEEDS = [0.25, 0.5, 1, 2, 4];
const BEAT = 1200; // milliseconds of a round at speed 1
const LONGEST = 90_000; // milliseconds of a whole run at speed 1
const IDLE = 350; // milliseconds at most in which nothing is under way
const KEYS = "Space plays and pauses; arrow right and left go to the next and the previous message, " +
  "page down and page up to the next and the previous round, Home and End to the ends; " +
  "v switches between contributions and values.";

export class Stage {
  constructor(model, el) {
    const picture = model.get("picture");
    Object.assign(this, { model, theme: picture.theme, next: picture.next ?? 0, speed: 1, playing: false });
    this.#build(el);
    this.#listen();
    this.#load(picture);
    this.#drain();
    this.root.dataset.stage = "ready";
  }

  // -- what is on the page ----------------------------------------------------------

  #build(el) {
    const button = (name, label, icon, act) => {
      const b = h("button", { type: "button", class: `dk-button dk-${name}`, "aria-label": label, title: label },
        h("i", { class: `dk-icon dk-icon-${icon}`, "aria-hidden": "true" }));
      b.addEventListener("click", act);
      return b;
    };
    this.head = h("div", { class: "dk-head" });
    this.notices = h("ul", { class: "dk-notices" });
    this.play = button("play", "play (space)", "play", () => this.#toggle());
    this.speeds = h("select", { class: "dk-speed", "aria-label": "speed" }, SPEEDS.map((s) =>
      h("option", { value: s, ...(s === 1 ? { selected: "" } : {}) }, `${s} ×`)));
    this.scrub = h("input", { type: "range", class: "dk-scrub", min: 0, max: 1000, step: 1, "aria-label": "time" });
    this.clock = h("output", { class: "dk-clock" });
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
      button("back", "previous message (←)", "left", () => this.#step(-1)), this.play,
      button("next", "next message (→)", "right", () => this.#step(1)),
      this.speeds, this.scrub, this.clock, this.clocks);
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
    on(matchMedia("(prefers-color-scheme: dark)"), "change", () => this.#look());
    on(this.speeds, "change", () => { this.speed = Number(this.speeds.value); });
    on(this.scrub, "input", () => {
      const [part, { start, end }] = [this.scrub.value / 1000, this.script];
      this.#pause();
      this.#seek(part < 1 ? start + part * (end - start) : end);
    });
    on(this.list, "click", (e) => {
      const row = e.target.closest("li");
      if (row) this.#glide(Number(row.dataset.beat));
    });
  }

  // Colours as the page has them now.
  #look() {
    const canvas = document.createElement("canvas").getContext("2d");
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
    const follows = !this.script || (this.picture.live && this.time >= this.script.end);
    this.picture = picture;
    this.ticks ??= picture.clock ?? "time";
    this.script = new Script(picture, this.ticks === "rounds");
    for (const b of this.clocks.children) b.setAttribute("aria-pressed", String(b.dataset.clock === this.ticks));
    this.scene.load(picture, this.script);
    this.#words();
    this.#rows();
    this.#show(picture.known ? this.scene.mode ?? "contributions" : "values");
    this.time = clamp(follows && picture.live ? this.script.end : this.time ?? this.script.opening,
      this.script.start, this.script.end);
    this.#look();
  }

  // Another clock: the run begins anew.
  #wind(ticks) {
    if (ticks === this.ticks) return;
    this.#pause();
    Object.assign(this, { ticks, time: undefined });
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

  // -- time -----------------------------------------------------------------------------

  #rate() { // seconds of the trace per millisecond
    const { start, end, rounds } = this.script;
    return (this.speed * Math.max(end - start, 1e-9)) / clamp(rounds * BEAT, BEAT, LONGEST);
  }

  #toggle() {
    if (this.playing) return this.#pause();
    if (this.time >= this.script.last) this.#seek(this.script.opening);
    if (!this.script.beats.length) return;
    this.playing = true;
    this.#icon();
    let before = performance.now();
    const tick = (now) => {
      if (!this.playing || this.gone) return;
      this.#advance(Math.min(now - before, 100));
      before = now;
      if (this.time >= this.script.last) this.#pause();
      else this.ticking = requestAnimationFrame(tick);
    };
    if (still()) this.#march();
    else this.ticking = requestAnimationFrame(tick);
  }

  // Without motion: from message to message.
  #march() {
    if (!this.playing || this.gone) return;
    this.#step(1, true);
    if (this.time >= this.script.last) return this.#pause();
    this.marching = setTimeout(() => this.#march(), BEAT / this.speed / 1.5);
  }

  #advance(elapsed) {
    const rate = this.#rate();
    const next = this.script.wakes(this.time);
    const from = next - this.time > IDLE * rate ? next - IDLE * rate : this.time;
    this.#seek(Math.min(from + elapsed * rate, this.script.last));
  }

  #pause() {
    this.playing = false;
    cancelAnimationFrame(this.ticking);
    clearTimeout(this.marching);
    this.#icon();
    if (this.script) this.#draw();
  }

  #icon() {
    this.play.firstChild.className = `dk-icon dk-icon-${this.playing ? "pause" : "play"}`;
    this.play.setAttribute("aria-label", this.playing ? "pause (space)" : "play (space)");
    this.root.dataset.playing = this.playing;
  }

  #seek(time) {
    cancelAnimationFrame(this.gliding);
    this.time = clamp(time, this.script.start, this.script.end);
    this.#draw();
  }

  #step(by, playing = false) {
    if (!playing) this.#pause();
    const target = this.script.beside(this.#target ?? this.#current(), by);
    if (target < 0) return this.#glideTo(this.script.opening, -1);
    this.#glide(target);
  }

  #target = null;

  #current() {
    return this.chosen ?? this.script.at(this.time);
  }

  #round(by) {
    this.#pause();
    this.#glide(this.script.round(this.#target ?? this.#current(), by));
  }

  // To the moment when a message has arrived, seeing it come if that is near.
  #glide(i) {
    if (i < 0) return this.#seek(this.script.opening);
    const beat = this.script.beats[i];
    if (beat) this.#glideTo(beat.end ?? this.script.end, i);
  }

  #glideTo(time, i) {
    cancelAnimationFrame(this.gliding);
    const from = this.time;
    const beat = this.script.beats[i];
    const begin = beat && time > from ? Math.max(from, beat.begin) : from;
    const finish = () => {
      this.#target = null;
      this.chosen = i;
      this.time = time;
      this.#draw(false, true);
    };
    if (still() || time <= from) return finish();
    this.#target = i;
    const started = performance.now();
    const tick = (now) => {
      const t = clamp((now - started) / 520, 0, 1);
      if (t >= 1) return finish();
      this.time = begin + t * (time - begin);
      this.chosen = null;
      this.#draw();
      this.gliding = requestAnimationFrame(tick);
    };
    this.gliding = requestAnimationFrame(tick);
  }

  // -- drawing -------------------------------------------------------------------------------

  #show(mode) {
    this.scene.mode = mode;
    for (const b of this.mode.children) b.setAttribute("aria-pressed", String(b.dataset.mode === mode));
    if (this.time !== undefined) this.#draw(true);
  }

  #draw(anew = false, chosen = false) {
    if (!chosen) this.chosen = null;
    const { script, time } = this;
    const now = this.chosen ?? script.at(time);
    this.scene.draw(time, { anew, resting: !this.playing && this.#target === null ? now : -1 });
    const part = (time - script.start) / Math.max(script.end - script.start, 1e-12);
    this.scrub.value = Math.round(1000 * part);
    this.scrub.style.setProperty("--part", part);
    const clock = script.says(time);
    this.scrub.setAttribute("aria-valuetext", clock);
    if (this.clock.textContent !== clock) this.clock.textContent = clock;
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
    if (e.ctrlKey || e.metaKey || e.altKey || ["Tab", "Escape", "Enter"].includes(e.key)) return;
    e.stopPropagation(); // JupyterLab has other uses for these keys
    if (e.target.closest("select, input") || (e.key === " " && e.target.closest("button"))) return;
    const act = {
      " ": () => this.#toggle(), p: () => this.#toggle(), n: () => this.#step(1), b: () => this.#step(-1),
      ArrowRight: () => this.#step(1), ArrowLeft: () => this.#step(-1),
      PageDown: () => this.#round(1), PageUp: () => this.#round(-1),
      Home: () => { this.#pause(); this.#seek(this.script.opening); },
      End: () => { this.#pause(); this.#seek(this.script.end); },
      v: () => this.picture.known && this.#show(this.scene.mode === "values" ? "contributions" : "values"),
    }[e.key];
    if (!act) return;
    e.preventDefault();
    act();
  }

  dispose() {
    this.gone = true;
    this.#pause();
    cancelAnimationFrame(this.gliding);
    this.stop.abort();
    this.model.off("change", this.changed);
    this.root.remove();
  }
}
