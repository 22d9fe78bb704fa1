// The cockpit in the browser: controls, source, a card per rank, and the timeline below.
// It shows one moment, and requests others from the kernel.

import { Cards } from "./cards.js";
import { applyTheme } from "./colors.js";
import { chips, Controls, positionText } from "./controls.js";
import { h, modified, handleKey, liveRegion } from "./dom.js";
import { Follower } from "./follower.js";
import { Marks } from "./marks.js";
import { clamp } from "./numbers.js";
import { Source } from "./source.js";
import { Connection } from "./connection.js";
import { Timeline } from "./timeline.js";

const SILENT = "The kernel is not responding, possibly because it is running a cell. If the " +
  "kernel has stopped, run the cell again.";
const GONE = "The kernel has stopped: run the cell again.";
// heights of the timeline's lanes and their parts, if space permits [px]
const SIZES = { height: 118, min_gap: 4, pad: 1, gap: 2, row: 16, axis: 22 };

export class Cockpit extends Follower {
  constructor(model, el) {
    super(model, "steps");
    Object.assign(this, { state: model.get("steps"), drawn: 0, wanted: null, absent: "" });
    this.connection = new Connection(model, (status) => this.#setAbsent(status));
    this.#build(el);
    this.source.add(model.get("sources"));
    this.#listen();
    this.frame();
    this.root.dataset.cockpit = "ready";
  }

  // -- elements ---------------------------------------------------------------------

  #build(el) {
    const { ranks, name } = this.state;
    const below = h("div", { class: "dk-below" });
    this.parts = Object.fromEntries(["step", "finding", "error"].map((part) =>
      [part, h("div", { class: `dk-${part}` })]));
    this.chips = h("ul", { class: "dk-chips" });
    this.liveRegion = liveRegion();
    this.root = h("figure", { class: "distkit-cockpit", tabindex: 0, role: "group",
      "aria-label": `stepping through ${name}; keys: n next, b back, p play, ? all keys` });
    el.append(this.root);
    this.root.append(below);
    const onThemeChange = (style) => applyTheme(this.root, style); // the timeline detects theme changes
    this.timeline = new Timeline(this.model, below, { stepped: true, onThemeChange });
    const { theme } = this.timeline;
    this.timeline.theme = { ...theme, sizes: { ...theme.sizes, ...SIZES } };
    this.source = new Source(ranks);
    this.cards = new Cards(ranks, this.timeline.store);
    this.controls = new Controls(ranks, (rank) => this.timeline.store.name(rank),
      (act, value) => this.#act(act, value));
    const head = h("header", { class: "dk-top" }, h("strong", { class: "dk-name" }, name),
      this.parts.step, this.chips);
    this.root.prepend(head, this.controls.root, this.controls.help, this.parts.error,
      this.parts.finding, h("div", { class: "dk-body" }, this.source.root, this.cards.root));
    this.root.append(this.liveRegion);
  }

  // -- from the kernel -----------------------------------------------------------------

  update(steps) {
    this.state = steps;
    this.source.add(this.model.get("sources"));
  }

  // -- drawing ----------------------------------------------------------------------------

  frame() {
    const { state, parts } = this;
    const { position, moment } = state;
    const past = position < state.last;
    const absent = { silent: SILENT, gone: GONE }[this.absent] ?? "";
    this.controls.show({ ...state, absent });
    parts.error.textContent = absent || state.error;
    const reason = state.finished ? "The program has no communication calls to step through."
      : "The program has not reached a communication call yet.";
    this.source.explain(this.timeline.store.count ? "The program's source is unknown." : reason);
    const shown = JSON.stringify([past, moment]);
    if (shown !== this.shown) this.#show(past);
    this.shown = shown;
    const key = JSON.stringify(state.remarks);
    if (key !== this.remarksKey) this.#showRemarks(state.remarks, moment, key);
    this.root.dataset.position = position;
    const now = state.playing ? "playing" : state.finished ? "finished" : "now";
    this.root.dataset.state = absent ? "absent" : past ? "past" : now;
  }

  #show(past) {
    const { moment: old, state } = this;
    const { moment } = state;
    Object.assign(this, { moment, remarksKey: null });
    this.cards.show(moment.ranks);
    this.timeline.dimAfter(past ? moment.time : null);
    this.parts.step.textContent = positionText(state);
    this.parts.step.dataset.past = past ? "looking back" : "";
    this.chips.replaceChildren(...chips(moment));
    if (old) this.#announceChanges(old, moment, past);
    this.drawn += 1;
    this.root.dataset.moment = this.drawn;
  }

  #showRemarks(shown, moment, key) {
    this.remarksKey = key;
    this.parts.finding.replaceChildren(...shown.map((one) => remark(one, this.state.pages)));
    const hot = shown.flatMap(({ lines }) => Object.values(lines));
    this.source.show(moment.ranks.filter(({ where }) => where), hot);
    if (shown.length) this.#announce(shown.map(({ message }) => message).join(" "));
  }

  #announceChanges(old, moment, past) {
    const before = new Map(old.ranks.map(({ rank, words }) => [rank, words]));
    const changed = moment.ranks.filter(({ rank, words }) => before.get(rank) !== words);
    const what = changed.slice(0, 8).map(({ words }) => words).join("; ");
    this.#announce(`${past ? "looking back, " : ""}${positionText(this.state)}. ${what}`);
  }

  #announce(text) {
    this.liveRegion.textContent = text;
  }

  // -- user input --------------------------------------------------------------------------

  #listen() {
    this.onKeys((e) => this.#onKey(e));
    this.on(this.root, "pointerdown", (e) => {
      if (e.target.closest("button, select, input, canvas, details")) return;
      this.root.focus({ preventScroll: true });
    });
  }

  #act(name, value) {
    const { why, speed } = this.controls;
    const [, reason] = name !== "go" ? [name, why[name]]
      : why.resume.find(([rank]) => rank === value) ?? [value, `There is no rank ${value}.`];
    if (reason) return this.#announce(reason);
    const { position, last, playing } = this.state;
    const past = position < last;
    const commands = {
      go: { do: "next", rank: value },
      next: past ? { do: "seek", position: position + 1 } : { do: "next" },
      play: playing ? { do: "pause" } : { do: "play", speed: Number(speed.value) },
      back: { do: "back" }, finish: { do: "finish" },
    };
    if (name === "help") this.controls.help.hidden = !this.controls.help.hidden;
    else if (name === "seek") this.#seek(value);
    else this.connection.send(commands[name]);
  }

  // Sends one request at a time; while the slider moves, only its latest position counts.
  #seek(position) {
    const pending = this.wanted !== null;
    this.wanted = position;
    if (pending) return;
    this.controls.scrubbing = true;
    this.connection.send({ do: "seek", position }, () => {
      const { wanted } = this;
      this.wanted = null;
      if (wanted !== position) return this.#seek(wanted);
      this.controls.scrubbing = false;
      this.scheduleFrame();
    });
  }

  #onKey(e) {
    if (modified(e) || ["Tab", "Escape"].includes(e.key)) return;
    if (e.key !== "Enter" || !e.shiftKey) e.stopPropagation(); // JupyterLab has shortcuts for these keys
    if (e.target.closest("canvas, select, input")) return;
    const press = e.target.closest("button, summary") && e.key === " "; // the key presses the button
    const act = {
      n: ["next"], ArrowRight: ["next"], b: ["back"], ArrowLeft: ["back"], p: ["play"],
      " ": press ? null : ["play"], f: ["finish"], "?": ["help"],
      Home: ["seek", 0], End: ["seek", this.state.last],
      ...(/^\d$/.test(e.key) ? { [e.key]: ["go", Number(e.key)] } : {}),
    }[e.key];
    handleKey(e, act && (() => this.#act(...act)));
  }

  // status: "silent", "gone", or "" if the kernel responds.
  #setAbsent(status) {
    if (status === this.absent) return;
    this.absent = status;
    [this.wanted, this.controls.scrubbing] = [null, false];
    this.scheduleFrame();
  }

  ended() {
    this.#setAbsent("gone");
  }

  dispose() {
    this.connection.dispose();
    this.timeline.dispose();
    this.source.dispose();
    super.dispose();
  }
}

function remark({ message, more, traceback, remedy, hang, graph }, pages) {
  const words = [more, remedy].filter(Boolean).map((text) => h("span", {}, linked(text, pages)));
  return h("div", { class: "dk-remark", "data-hang": String(hang) },
    h("div", {}, h("strong", {}, linked(message, pages)), words,
      traceback ? h("details", {}, h("summary", {}, "traceback"), h("pre", {}, traceback)) : null),
    graph ? h("figure", { class: "dk-graph", role: "img", title: "which rank waits for which",
      "aria-label": graph.description }, drawn(graph)) : null);
}

// Links the code of each finding to its page.
function linked(text, pages) {
  const page = (code) => h("a", { href: `${pages}/${code}.md`, target: "_blank" }, code);
  return text.split(/(?<=\[)(DK\d{3})(?=\])/).map((part, i) => (i % 2 ? page(part) : part));
}

function drawn({ scene, styles }) {
  const marks = new Marks("dk-waits");
  marks.load(scene, styles);
  marks.draw(0, -1);
  marks.root.setAttribute("width", scene.width);
  return marks.root;
}
