// The command buttons, and the reasons why some of them are disabled.

import { h, icon, speedSelect } from "./dom.js";
import { clamp } from "./numbers.js";
import { rankColors } from "./source.js";

const SPEEDS = [0.5, 1, 2, 5, 10]; // steps per second
const HELP = [
  ["n →", "next step, every rank"], ["0 … 9", "resume that rank"], ["b ←", "back"],
  ["space p", "play, pause"], ["f", "finish"], ["Home End", "first, last moment"],
  ["?", "these keys"],
];

export class Controls {
  // act(name, value) executes next, go, back, play, finish, seek or help.
  constructor(ranks, name, act) {
    this.act = act;
    this.buttons = {
      back: this.#button("back", "Back", "left"), next: this.#button("next", "Next", "right"),
      play: this.#button("play", "Play", "play"), finish: this.#button("finish", "Finish", "end"),
      help: this.#button("help", "?"),
    };
    this.go = new Map(ranks.map((rank) => [rank, this.#rank(rank, name(rank))]));
    this.speed = speedSelect(SPEEDS, "/ s");
    this.scrub = h("input", { type: "range", class: "dk-scrub", min: 0, step: 1,
      "aria-label": "moment", oninput: () => act("seek", Number(this.scrub.value)) });
    const { back, next, play, finish, help } = this.buttons;
    this.root = h("div", { class: "dk-controls", role: "toolbar", "aria-label": "stepping" },
      h("div", { class: "dk-group" }, back, next),
      h("div", { class: "dk-group dk-ranks" }, h("span", { class: "dk-label" }, "resume"),
        [...this.go.values()]),
      h("div", { class: "dk-group" }, play, this.speed, finish),
      h("div", { class: "dk-group dk-time" }, this.scrub, help));
    this.help = h("dl", { class: "dk-help", hidden: "" },
      HELP.map(([keys, what]) => h("div", {}, h("dt", {}, keys), h("dd", {}, what))));
  }

  #button(name, text, sign = "") {
    const attributes = { type: "button", class: `dk-button dk-${name}`, onclick: () => this.act(name) };
    return h("button", attributes, sign ? icon(sign) : null, h("span", {}, text));
  }

  #rank(rank, name) {
    return h("button", { type: "button", class: "dk-button dk-go", "data-rank": rank,
      style: rankColors(rank), "aria-label": `resume ${name}`, onclick: () => this.act("go", rank) },
    String(rank));
  }

  // The reason why each button is disabled; "" if it is enabled.
  reasons({ position, last, rank_states: ranks, playing, finished, absent }) {
    const past = position < last;
    const busy = playing ? "The program is playing: pause it first." : "";
    const over = finished ? "The program has finished." : "";
    const paused = ranks.some(({ status }) => status === "paused");
    const stuck = paused || ranks.some(({ status }) => status === "running") ? ""
      : "No rank is paused, so none can continue.";
    const states = new Map(ranks.map((rank) => [rank.rank, rank]));
    const resume = [...this.go.keys()].map((rank) => {
      const { status, words } = states.get(rank) ?? {};
      const why = status === "paused" ? "" : words ?? `rank ${rank} does not take part`;
      const back = past ? "This is an earlier step: go to the last step first." : "";
      return [rank, absent || over || busy || back || why];
    });
    return {
      back: absent || busy || (position > 0 ? "" : "There is no earlier step."),
      next: absent || busy || (past ? "" : over || stuck),
      play: absent || (playing || past ? "" : over || stuck),
      finish: absent || over || (playing ? "" : stuck), seek: absent, help: "", resume,
    };
  }

  show(state) {
    const why = this.why = this.reasons(state);
    const { position, last, playing, absent } = state;
    const past = position < last;
    const titles = {
      back: "one step back (b)",
      play: playing ? "pause (p)" : past ? "play from this step (p)" : "play (p)",
      next: past ? "one step forward (n)" : "resume every rank (n)",
      finish: "run to the end (f)", help: "keys (?)",
    };
    for (const [name, button] of Object.entries(this.buttons))
      setEnabled(button, why[name], titles[name]);
    for (const [rank, reason] of why.resume)
      setEnabled(this.go.get(rank), reason, `resume rank ${rank} (${rank})`);
    this.buttons.play.lastChild.textContent = playing ? "Pause" : "Play";
    this.buttons.play.firstChild.className = `dk-icon dk-icon-${playing ? "pause" : "play"}`;
    this.scrub.max = last;
    if (!this.scrubbing) this.scrub.value = position;
    this.scrub.disabled = !last || playing || absent !== "";
    this.scrub.setAttribute("aria-valuetext", `step ${position} of ${last}`);
    this.scrub.style.setProperty("--part", clamp(position / Math.max(1, last), 0, 1));
  }
}

// Disabled buttons keep the focus, and show the reason as a tooltip.
function setEnabled(button, why, title) {
  button.setAttribute("aria-disabled", String(why !== ""));
  button.title = why || title;
}

// The number of ranks in each state, such as "2 paused" or "all blocked".
export function chips({ ranks }) {
  const words = ["paused", "blocked", "running", "finished", "stopped", "failed", "died"];
  return words.map((word) => [word, ranks.filter(({ status }) => status === word)])
    .filter(([, members]) => members.length)
    .map(([word, members]) => h("li", { class: "dk-chip", "data-status": word,
      title: members.map(({ words: text }) => text).join("\n") },
    members.length === ranks.length && ranks.length > 1 ? `all ${word}` : `${members.length} ${word}`));
}

export function positionText({ position, last, stopped }) {
  return (last ? `step ${position} of ${last}` : "before the first step") +
    (stopped && position === last ? " · You stopped it here." : "");
}
