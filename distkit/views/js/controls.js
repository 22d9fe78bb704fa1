// The buttons: what can be done now, and why the rest cannot.

import { h } from "./dom.js";
import { clamp } from "./numbers.js";
import { paint } from "./source.js";

const SPEEDS = [0.5, 1, 2, 5, 10]; // steps per second
export const HELP = [
  ["n →", "next step, every rank"], ["0 … 9", "let that rank go"], ["b ←", "back"],
  ["space p", "play, pause"], ["f", "finish"], ["Home End", "first, last moment"], ["?", "these keys"],
];

export class Controls {
  // act(name, value) is called with what the reader wants: next, go, back, play, finish, seek, help.
  constructor(ranks, name, act) {
    this.act = act;
    this.buttons = {
      back: this.#button("back", "Back", "left"), next: this.#button("next", "Next", "right"),
      play: this.#button("play", "Play", "play"), finish: this.#button("finish", "Finish", "end"),
      help: this.#button("help", "?"),
    };
    this.go = new Map(ranks.map((rank) => [rank, this.#rank(rank, name(rank))]));
    this.speed = h("select", { class: "dk-speed", "aria-label": "speed" }, SPEEDS.map((speed) =>
      h("option", { value: speed, ...(speed === 1 ? { selected: "" } : {}) },
        `${speed} / s`)));
    this.scrub = h("input", { type: "range", class: "dk-scrub", min: 0, step: 1, "aria-label": "moment" });
    this.scrub.addEventListener("input", () => act("seek", Number(this.scrub.value)));
    const { back, next, play, finish, help } = this.buttons;
    this.root = h("div", { class: "dk-controls", role: "toolbar", "aria-label": "step" },
      h("div", { class: "dk-group" }, back, next),
      h("div", { class: "dk-group dk-ranks" }, h("span", { class: "dk-label" }, "let go"),
        [...this.go.values()]),
      h("div", { class: "dk-group" }, play, this.speed, finish),
      h("div", { class: "dk-group dk-time" }, this.scrub, help));
    this.help = h("dl", { class: "dk-help", hidden: "" },
      HELP.map(([keys, what]) => h("div", {}, h("dt", {}, keys), h("dd", {}, what))));
  }

  #button(name, text, icon = "") {
    const b = h("button", { type: "button", class: `dk-button dk-${name}` },
      icon ? h("i", { class: `dk-icon dk-icon-${icon}`, "aria-hidden": "true" }) : null,
      h("span", {}, text));
    b.addEventListener("click", () => this.act(name));
    return b;
  }

  #rank(rank, name) {
    const b = h("button", { type: "button", class: "dk-button dk-go", "data-rank": rank,
      style: paint(rank), "aria-label": `let ${name} go` }, String(rank));
    b.addEventListener("click", () => this.act("go", rank));
    return b;
  }

  // Why each button makes no sense now; "" where it does.
  reasons({ position, moments, playing, finished, absent }) {
    const last = moments.length - 1;
    const [past, { ranks }] = [position < last, moments[last]];
    const busy = playing ? "It is playing: pause it first." : "";
    const over = finished ? "The program has ended." : "";
    const paused = ranks.some(({ doing }) => doing === "paused");
    const stuck = paused || ranks.some(({ doing }) => doing === "running") ? ""
      : "No rank is paused: nobody can be let go.";
    if (absent) return { back: absent, next: absent, play: absent, finish: absent, seek: absent, help: "",
      letGo: [...this.go.keys()].map((rank) => [rank, absent]) };
    const of = new Map(ranks.map((rank) => [rank.rank, rank]));
    const letGo = [...this.go.keys()].map((rank) => {
      const { doing, words } = of.get(rank) ?? {};
      const why = doing === "paused" ? "" : words ?? `rank ${rank} takes no part`;
      return [rank, over || busy || (past ? "You are looking back: go to the last step first." : why)];
    });
    return {
      back: busy || (position > 0 ? "" : "This is the first moment."),
      next: busy || (past ? "" : over || stuck),
      play: playing || past ? "" : over || stuck, finish: over || (playing ? "" : stuck), help: "", letGo,
    };
  }

  show(state) {
    const why = this.why = this.reasons(state);
    const { position, moments, playing, absent } = state;
    const past = position < moments.length - 1;
    const titles = { back: "one moment back (b)", play: playing ? "pause (p)" : past ? "play again what was (p)" : "play (p)",
      next: past ? "one moment on (n)" : "let the next communication of every rank go (n)",
      finish: "let everything go (f)", help: "keys (?)" };
    for (const [name, button] of Object.entries(this.buttons)) able(button, why[name], titles[name]);
    for (const [rank, reason] of why.letGo) able(this.go.get(rank), reason, `let rank ${rank} go (${rank})`);
    this.buttons.play.lastChild.textContent = playing ? "Pause" : "Play";
    this.buttons.play.firstChild.className = `dk-icon dk-icon-${playing ? "pause" : "play"}`;
    this.scrub.max = Math.max(0, moments.length - 1);
    if (!this.scrubbing) this.scrub.value = position;
    this.scrub.disabled = moments.length < 2 || playing || absent !== "";
    this.scrub.setAttribute("aria-valuetext", `step ${position} of ${moments.length - 1}`);
    this.scrub.style.setProperty("--part", clamp(position / Math.max(1, moments.length - 1), 0, 1));
  }
}

// Disabled buttons keep the focus and tell why when pointed at.
function able(button, why, title) {
  button.setAttribute("aria-disabled", String(why !== ""));
  button.title = why || title;
}

// How many ranks are where: "2 paused", "1 blocked".
export function chips({ ranks }) {
  const words = ["paused", "blocked", "running", "finished", "released", "failed", "died"];
  return words.map((word) => [word, ranks.filter(({ doing }) => doing === word)])
    .filter(([, some]) => some.length)
    .map(([word, some]) => h("li", { class: "dk-chip", "data-doing": word,
      title: some.map(({ words: told }) => told).join("\n") },
    some.length === ranks.length && ranks.length > 1 ? `all ${word}` : `${some.length} ${word}`));
}

export const stepOf = ({ position, moments }) =>
  (moments.length > 1 ? `step ${position} of ${moments.length - 1}` : "before the first step");
