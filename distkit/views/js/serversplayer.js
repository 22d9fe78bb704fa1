// Goes through a script's beats: plays, pauses, steps, seeks. Busy and idle stretches pass at a pace
// that lets every message be seen.

import { still } from "./dom.js";
import { clamp } from "./numbers.js";
import { order } from "./serversstate.js";

const [SHORT, LONG] = [70, 420]; // milliseconds between two ticks, at least and at most
const WHOLE = 40_000; // milliseconds of a run in which nothing is too short or too long
const GLIDE = 520; // milliseconds of a step
const MARCH = 800; // milliseconds from beat to beat without motion

export class Player {
  // show(moving): time or beat have changed; told(playing): it has begun or ended to play.
  constructor(show, told) {
    Object.assign(this, { show, told, speed: 1, playing: false, chosen: null, target: null });
  }

  // follow: stay at the end.
  load(script, opening, follow) {
    const begins = script.beats.map(({ begin }) => begin);
    this.script = script;
    this.ticks = [...new Set([...begins, ...script.ends, script.start, script.last])].sort((a, b) => a - b);
    if (follow) this.chosen = null;
    this.time = clamp(follow ? script.end : this.time ?? opening, script.start, script.end);
  }

  // The beat that is shown; -1: none has ended yet.
  get beat() {
    return this.chosen ?? this.script.at(this.time);
  }

  get resting() {
    return !this.playing && this.target === null;
  }

  toggle() {
    if (this.playing) return this.pause();
    const { script } = this;
    if (!script.beats.length) return;
    if (this.time >= script.last) this.seek(script.start);
    this.playing = true;
    this.told(true);
    if (still()) return this.#march();
    let before = performance.now();
    const tick = (now) => {
      if (!this.playing) return;
      this.#advance(Math.min(now - before, 100) * this.speed);
      before = now;
      if (this.time >= this.script.last) return this.pause();
      this.show(true);
      this.ticking = requestAnimationFrame(tick);
    };
    this.ticking = requestAnimationFrame(tick);
  }

  // Without motion: from beat to beat.
  #march() {
    if (!this.playing) return;
    this.#to(this.script.beside(this.beat, 1));
    this.show(false);
    if (this.time >= this.script.last) return this.pause();
    this.marching = setTimeout(() => this.#march(), MARCH / this.speed);
  }

  #advance(left) {
    const { ticks, script } = this;
    this.chosen = null;
    while (left > 0 && this.time < script.last) {
      const i = order.right(ticks, this.time);
      if (i >= ticks.length) this.time = script.last;
      if (i < 1 || i >= ticks.length) return;
      const gap = ticks[i] - ticks[i - 1];
      const lasts = clamp((gap / Math.max(script.end - script.start, 1e-12)) * WHOLE, SHORT, LONG);
      const need = ((ticks[i] - this.time) / gap) * lasts;
      this.time = need <= left ? ticks[i] : this.time + (gap * left) / lasts;
      left -= need;
    }
  }

  pause() {
    cancelAnimationFrame(this.ticking);
    cancelAnimationFrame(this.gliding);
    clearTimeout(this.marching);
    const was = this.playing;
    Object.assign(this, { playing: false, target: null });
    if (was) this.told(false);
    if (this.script) this.show(false);
  }

  seek(time) {
    this.chosen = null;
    this.time = clamp(time, this.script.start, this.script.end);
    this.pause();
  }

  step(by) {
    this.go(this.script.beside(this.target ?? this.beat, by));
  }

  // To a beat's end, seeing it come if that is near.
  go(i) {
    const from = this.time;
    this.pause();
    const beat = this.script.beats[i];
    const end = beat ? beat.end ?? this.script.end : this.script.start;
    if (still() || !beat || end <= from) {
      this.#to(i);
      return this.show(false);
    }
    const begin = Math.max(from, beat.begin);
    const started = performance.now();
    this.target = i;
    const tick = (now) => {
      const part = (now - started) / GLIDE;
      if (part >= 1) {
        this.target = null;
        this.#to(i);
        return this.show(false);
      }
      this.chosen = null;
      this.time = begin + Math.max(part, 0) * (end - begin);
      this.show(true);
      this.gliding = requestAnimationFrame(tick);
    };
    this.gliding = requestAnimationFrame(tick);
  }

  #to(i) {
    const beat = this.script.beats[i];
    this.chosen = i;
    this.time = beat ? beat.end ?? this.script.end : this.script.start;
  }
}
