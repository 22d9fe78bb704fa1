// Keyframes over time, and a player that plays, pauses, steps and seeks, with buttons and keys.

import { button, h, icon, modified, handleKey, speedSelect, reducedMotion } from "./dom.js";
import { clamp } from "./numbers.js";
import { d3 } from "./vendor/d3.js";

const GLIDE = 800; // duration of an animated step [ms]
const STEP_PERIOD = 800; // time between keyframes if motion is reduced [ms]

// Keyframes sorted by end.
export class Script {
  constructor({ start, end, keyframes }) {
    this.ends = keyframes.filter((keyframe) => keyframe.end !== null).map((keyframe) => keyframe.end);
    // nothing moves after the last end, unless a keyframe never ends
    const last = this.ends.length < keyframes.length ? end : Math.max(start, ...this.ends.slice(-1));
    Object.assign(this, { start, end, keyframes, last });
    this.first = Math.min(0, this.at(start)); // 0 if the first keyframe ends at the start, else -1
  }

  // The index of the last keyframe that has ended, or -1.
  at(time) {
    return d3.bisector((x) => x).right(this.ends, time) - 1;
  }

  neighbor(i, by) {
    return clamp(i + by, this.first, this.keyframes.length - 1);
  }
}

export class Player {
  // show(moving) is called when the time or keyframe has changed, onplay() when playing has
  // started or stopped. pace(script) returns a function that advances a time at speed 1.
  constructor(pace, show, onplay) {
    Object.assign(this, { pace, show, onplay, speed: 1, playing: false, chosen: null, target: null });
  }

  // follow: whether to stay at the end.
  load(script, { opening, follow = false }) {
    Object.assign(this, { script, after: this.pace(script) });
    if (follow) this.chosen = null;
    const first = clamp(opening, script.start, script.end);
    if (this.time === undefined && !follow) this.fresh = first; // the user has not changed it yet
    this.time = follow ? script.end : clamp(this.time ?? first, script.start, script.end);
  }

  // The keyframe shown; -1 if none has ended yet.
  get keyframe() {
    return this.chosen ?? this.script.at(this.time);
  }

  get resting() {
    return !this.playing && this.target === null;
  }

  toggle() {
    if (this.playing) return this.pause();
    const { script } = this;
    if (!script.keyframes.length) return;
    // playing starts at the beginning, unless the user has chosen a moment
    if (this.time >= script.last || this.fresh === this.time) this.seek(this.script.start);
    this.fresh = null;
    this.playing = true;
    this.onplay();
    if (reducedMotion()) return this.#stepThrough();
    let before = performance.now();
    const tick = (now) => {
      if (!this.playing) return;
      this.chosen = null;
      this.time = this.after(this.time, Math.min(now - before, 100) * this.speed);
      before = now;
      if (this.time >= this.script.last) return this.pause();
      this.show(true);
      this.ticking = requestAnimationFrame(tick);
    };
    this.ticking = requestAnimationFrame(tick);
  }

  // Steps through keyframes without motion.
  #stepThrough() {
    if (!this.playing) return;
    this.jumpTo(this.script.neighbor(this.keyframe, 1));
    if (this.time >= this.script.last) return this.pause();
    this.stepTimer = setTimeout(() => this.#stepThrough(), STEP_PERIOD / this.speed);
  }

  pause() {
    cancelAnimationFrame(this.ticking);
    cancelAnimationFrame(this.gliding);
    clearTimeout(this.stepTimer);
    const wasPlaying = this.playing;
    Object.assign(this, { playing: false, target: null });
    if (wasPlaying) this.onplay();
    if (this.script) this.show(false);
  }

  seek(time) {
    this.chosen = this.fresh = null;
    this.time = clamp(time, this.script.start, this.script.end);
    this.pause();
  }

  step(by) {
    this.go(this.script.neighbor(this.target ?? this.keyframe, by));
  }

  // Moves to a keyframe's end; forward motion is animated.
  go(i) {
    const from = this.time;
    this.pause();
    const keyframe = this.script.keyframes[i];
    const end = this.#end(keyframe);
    if (reducedMotion() || !keyframe || end <= from) return this.jumpTo(i);
    const begin = Math.max(from, keyframe.begin);
    const started = performance.now();
    this.target = i;
    const tick = (now) => {
      const fraction = (now - started) / GLIDE;
      if (fraction >= 1) return this.jumpTo(i);
      this.chosen = null;
      this.time = begin + Math.max(fraction, 0) * (end - begin);
      this.show(true);
      this.gliding = requestAnimationFrame(tick);
    };
    this.gliding = requestAnimationFrame(tick);
  }

  // Moves to a keyframe's end, without animation.
  jumpTo(i) {
    const time = this.#end(this.script.keyframes[i]);
    Object.assign(this, { chosen: i, target: null, time, fresh: null });
    this.show(false);
  }

  #end(keyframe) {
    return keyframe ? keyframe.end ?? this.script.end : this.script.start;
  }
}

// Buttons, speeds, time slider and clock. steps: number of slider steps.
export class Bar {
  constructor(player, speeds, steps) {
    Object.assign(this, { player, steps });
    const tool = (name, label, sign, act) => {
      const element = button(label, icon(sign), act);
      element.className = `dk-button dk-${name}`;
      return element;
    };
    this.play = tool("play", "play (space)", "play", () => player.toggle());
    this.speeds = speedSelect(speeds, "×");
    this.scrub = h("input", { type: "range", class: "dk-scrub", min: 0, max: steps, step: 1,
      "aria-label": "time" });
    this.clock = h("output", { class: "dk-clock" });
    const [back, next] = [() => player.step(-1), () => player.step(1)];
    this.buttons = [tool("back", "back (←)", "left", back), this.play,
      tool("next", "next (→)", "right", next), this.speeds];
    this.speeds.addEventListener("change", () => { player.speed = Number(this.speeds.value); });
    this.scrub.addEventListener("input", () => {
      const { start, end } = player.script;
      const fraction = this.scrub.value / steps;
      player.seek(fraction < 1 ? start + fraction * (end - start) : end);
    });
  }

  // Shows the current time on the slider and as text.
  show(clock, more = "") {
    const { time, script } = this.player;
    const fraction = (time - script.start) / Math.max(script.end - script.start, 1e-12);
    this.scrub.value = Math.round(this.steps * fraction);
    this.scrub.style.setProperty("--part", fraction);
    this.scrub.setAttribute("aria-valuetext", more ? `${clock}: ${more}` : clock);
    if (this.clock.textContent !== clock) this.clock.textContent = clock;
  }

  showPlaying(root) {
    const { playing } = this.player;
    this.play.firstChild.className = `dk-icon dk-icon-${playing ? "pause" : "play"}`;
    this.play.setAttribute("aria-label", playing ? "pause (space)" : "play (space)");
    root.dataset.playing = playing;
  }

  // Handles a key; more: actions of a view's own keys.
  onKey(e, more) {
    if (modified(e) || ["Tab", "Escape", "Enter"].includes(e.key)) return;
    e.stopPropagation(); // JupyterLab has shortcuts for these keys
    if (e.target.closest("select") || (e.key === " " && e.target.closest("button"))) return;
    const { player } = this;
    const [play, next, back] = [() => player.toggle(), () => player.step(1), () => player.step(-1)];
    handleKey(e, { " ": play, p: play, n: next, b: back, ArrowRight: next, ArrowLeft: back,
      Home: () => player.go(player.script.first), End: () => player.seek(player.script.end), ...more }[e.key]);
  }
}
