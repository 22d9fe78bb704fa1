// Paints a moment of a parameter server as SVG: cards with keys and inboxes, workers, what is under way.

import { s } from "./dom.js";
import { clamp, humanBytes } from "./numbers.js";

const MANY = 5; // waiting pulls that are drawn, then they are counted

const ease = (f) => f * f * (3 - 2 * f);
const at = (x, y) => `translate(${x.toFixed(1)} ${y.toFixed(1)})`;
const pill = (version) => Math.max(34, 8 * `v${version}`.length + 14); // how wide
const cut = (text, room, size) => {
  const fits = Math.max(1, Math.floor(room / (size * 0.62)));
  return text.length > fits ? `${text.slice(0, fits - 1)}…` : text;
};

export class Shelves {
  constructor() {
    const names = ["links", "cards", "rows", "arcs", "people", "flights", "tokens"];
    this.layers = Object.fromEntries(names.map((name) => [name, s("g", { class: `dkp-${name}` })]));
    this.root = s("svg", { class: "dk-svg dkp-svg", "aria-hidden": "true" }, ...Object.values(this.layers));
  }

  load(picture) {
    const { width, height, cards, workers, scheduler, stubs, rows } = picture;
    this.picture = picture;
    this.lanes = new Map(picture.lanes.map(([rank, lane]) => [rank, lane % 8]));
    this.points = new Map([
      ...cards.map((c) => [c.rank, [c.x + c.w / 2, c.y + c.h]]),
      ...workers.map((w) => [w.rank, [w.x, w.y]]), ...scheduler.map((n) => [n.rank, [n.x, n.y]])]);
    this.root.setAttribute("viewBox", `0 0 ${width} ${height}`);
    for (const layer of Object.values(this.layers)) layer.replaceChildren();
    this.#links();
    this.layers.cards.append(...cards.map((c) => this.#card(c)), ...scheduler.map((n) => this.#scheduler(n)),
      ...stubs.map(({ x, y, text }) => this.#text(x, y + 5, text, "dkp-muted", { "text-anchor": "middle" })));
    this.rows = rows.map((row) => {
      const group = s("g", {});
      this.layers.rows.append(group);
      return { ...row, group, says: null };
    });
    this.people = new Map(workers.map((w) => [w.rank, { ...w, group: s("g", { transform: at(w.x, w.y) }), says: null }]));
    this.layers.people.append(...[...this.people.values()].map(({ group }) => group));
  }

  color(rank) {
    return `var(--dk-r${this.lanes.get(rank) ?? 7})`;
  }

  #ink(rank) {
    return `var(--dk-i${this.lanes.get(rank) ?? 7})`;
  }

  #text(x, y, words, kind = "", more = {}) {
    const text = s("text", { x, y, class: kind, ...more });
    text.textContent = words;
    return text;
  }

  // -- what stays -------------------------------------------------------------------------

  #links() {
    const { cards, workers } = this.picture;
    const paths = workers.flatMap((w) => cards.map((c) => `M${w.x} ${w.y - w.r}L${c.x + c.w / 2} ${c.y + c.h}`));
    if (paths.length) this.layers.links.append(s("path", { d: paths.join(""), class: "dk-link" }));
    this.lines = s("path", { class: "dk-link dkp-registered" });
    this.layers.links.append(this.lines);
  }

  #card({ rank, name, x, y, w, h, more }) {
    const group = s("g", { transform: at(x, y) }, s("rect", { width: w, height: h, rx: 10, class: "dkp-card" }),
      s("rect", { x: 12, y: 14, width: 11, height: 11, rx: 3, fill: this.color(rank) }),
      this.#text(30, 24, name, "dkp-name"));
    if (more) group.append(this.#text(12, h - 8, `and ${more} more keys`, "dkp-muted"));
    return group;
  }

  #scheduler({ x, y }) {
    this.roll = this.#text(0, 16, "", "dkp-muted", { "text-anchor": "middle" });
    return s("g", { transform: at(x, y) }, s("rect", { x: -62, y: -27, width: 124, height: 54, rx: 27, class: "dkp-card" }),
      this.#text(0, -2, "scheduler", "dkp-name", { "text-anchor": "middle" }), this.roll);
  }

  // -- a moment ---------------------------------------------------------------------------

  // resting: the beat that has just ended, -1: none
  draw(time, script, state, resting) {
    this.rows.forEach((row, i) => row.shown && this.#row(row, state.rows[i], resting >= 0 ? script.beats[resting] : null, i));
    for (const person of this.people.values()) this.#person(person, state.status.get(person.rank));
    this.#arcs(state);
    this.#present(state.present);
    this.layers.flights.replaceChildren();
    this.layers.tokens.replaceChildren();
    const way = script.underWay(time).slice(-200);
    for (const i of way) this.#fly(script.beats[i], time);
    if (resting >= 0 && !way.includes(resting)) this.#rest(script.beats[resting]);
  }

  #present(present) {
    const { scheduler, everybody } = this.picture;
    if (!scheduler.length) return;
    const here = present.size;
    this.roll.textContent = here >= everybody ? `all ${everybody} registered` : `${here} of ${everybody} registered`;
    const [{ rank }] = scheduler;
    const [x, y] = this.points.get(rank);
    const d = [...present].map((node) => this.points.get(node)).filter(Boolean).map(([a, b]) => `M${a} ${b}L${x} ${y}`).join("");
    this.lines.setAttribute("d", d || "M0 0");
  }

  #row(row, state, beat, i) {
    const fresh = beat && beat.row === i ? beat.kind : "";
    const says = JSON.stringify([state, fresh]);
    if (says === row.says) return;
    row.says = says;
    const { x, y, w, pill: [px, py], key, part, nbytes } = row;
    const size = [humanBytes(nbytes), part ? `part ${part[0]} of ${part[1]}` : ""].filter(Boolean).join(" · ");
    const name = cut(key, w - 50, 13);
    const left = x + name.length * 8.1 + 9;
    const parts = [s("rect", { x: x - 5, y: y - 2, width: w + 10, height: 52, rx: 7, class: fresh ? "dkp-row dkp-now" : "dkp-row" }),
      this.#text(x, y + 18, name, "dkp-key")];
    if (nbytes && left + size.length * 6 < px - 22) parts.push(this.#text(left, y + 18, size, "dkp-muted dkp-small"));
    if (state.version === null) parts.push(this.#text(px + 19, y + 18, "no value yet", "dkp-muted dkp-small", { "text-anchor": "end" }));
    else parts.push(this.#pill(px + 19 - pill(state.version) / 2, py, state.version, fresh === "update"));
    const title = s("title");
    title.textContent = [key, size].join(", ");
    row.group.replaceChildren(title, ...parts, ...this.#inbox(row, state), ...this.#held(row, state.held), ...this.#last(row, state.last));
  }

  // A place for each gradient of an update: who is missing is named in its empty place.
  #inbox({ slots }, { slots: here, missing }) {
    const { quorum } = this.picture;
    if (slots.length < quorum) {
      const [[x, y, w, h]] = slots;
      const part = Math.min(1, here.length / quorum);
      return [s("rect", { x, y: y + 4, width: w, height: 9, rx: 4.5, class: "dkp-slot" }),
        s("rect", { x, y: y + 4, width: (w * part).toFixed(1), height: 9, rx: 4.5, class: "dkp-part" }),
        this.#text(x + w + 6, y + 13, `${here.length}/${quorum}`, "dkp-small dkp-muted")];
    }
    return slots.map(([x, y, w, h], i) => {
      const all = here.filter(({ slot }) => slot === i);
      const group = s("g", { transform: at(x, y) });
      if (!all.length) {
        group.append(s("rect", { width: w, height: h, rx: 4, class: "dkp-slot" }));
        const who = missing[i];
        if (who !== undefined && w > 14) group.append(this.#text(w / 2, 12.5, String(who), "dkp-small dkp-muted", { "text-anchor": "middle" }));
        return group;
      }
      const [{ worker, version }] = all;
      group.append(s("rect", { width: w, height: h, rx: 4, fill: this.color(worker) }));
      const words = all.length > 1 ? `×${all.length}` : `∇v${version}`;
      if (w >= 11 + 6 * words.length - 6) group.append(this.#text(w / 2, 12.5, words, "dkp-label", { fill: this.#ink(worker) }));
      return group;
    });
  }

  #held({ wait: [x, y], x: left, w }, held) {
    if (!held.length) return [];
    const right = left + w;
    const fits = Math.min(MANY, Math.floor((right - x - 44) / 15));
    if (fits < held.length && fits < 2) return [this.#text(x - 5, y + 4, `${held.length} wait`, "dkp-small dkp-muted")];
    const drawn = held.slice(0, held.length > fits ? fits - 1 : fits);
    const rings = drawn.map((worker, i) => s("circle", { cx: x + 15 * i, cy: y, r: 6, class: "dkp-ring dkp-wait", stroke: this.color(worker) }));
    if (drawn.length < held.length) rings.push(this.#text(x + 15 * drawn.length - 3, y + 4, `+${held.length - drawn.length}`, "dkp-small dkp-muted"));
    return rings;
  }

  // The workers of the last update, and how late their gradients were.
  #last({ x, w, y }, last) {
    if (!last) return [];
    const late = Math.max(0, ...last.map(([, n]) => n));
    const words = late ? `${late} late` : last.length === 1 ? "fresh" : "";
    const width = words ? words.length * (late ? 7 : 6.2) + 6 : 0;
    const parts = words ? [this.#text(x + w, y + 41, words, late ? "dkp-late" : "dkp-small dkp-muted", { "text-anchor": "end" })] : [];
    const dots = last.slice(0, 4).map(([worker], i) =>
      s("circle", { cx: x + w - width - 6 - 11 * (Math.min(last.length, 4) - 1 - i), cy: y + 37, r: 4.2, fill: this.color(worker) }));
    return [...parts, ...dots];
  }

  #pill(x, y, version, fresh = false) {
    const w = pill(version);
    return s("g", { transform: at(x, y), class: fresh ? "dkp-pill dkp-fresh" : "dkp-pill" },
      s("rect", { x: -w / 2, y: -10, width: w, height: 20, rx: 10 }),
      this.#text(0, 4.5, `v${version}`, "", { "text-anchor": "middle" }));
  }

  // Hollow and dashed while it waits, pale when it has ended.
  #person(person, { kind = "", text = "" } = {}) {
    const says = `${kind} ${text}`;
    if (says === person.says) return;
    const { group, rank, name, r, room } = person;
    person.says = says;
    const waits = kind === "waits";
    const circle = s("circle", { r, class: waits ? "dkp-waiting" : "", [waits ? "stroke" : "fill"]: this.color(rank) });
    const number = this.#text(0, r * 0.36, String(rank), "dk-number", { "font-size": r * 0.95, ...(waits ? {} : { fill: this.#ink(rank) }) });
    group.setAttribute("class", `dkp-person dkp-${kind || "idle"}`);
    const below = room < 66 ? [] : [this.#text(0, r + 19, cut(name, room, 13), "dkp-name", { "text-anchor": "middle" }),
      this.#text(0, r + 37, cut(text.length * 6.8 > room ? text.replaceAll("worker ", "") : text, room + 14, 11.5),
        waits ? "dkp-status dkp-strong" : "dkp-status", { "text-anchor": "middle" })];
    const cross = kind === "ended" && text === "died" ? [s("path", { d: `M${-r} ${-r}L${r} ${r}M${r} ${-r}L${-r} ${r}`, class: "dkp-cross" })] : [];
    group.replaceChildren(circle, number, ...below, ...cross);
  }

  // Who waits for whom, from worker to worker.
  #arcs({ status }) {
    const arcs = [];
    for (const [rank, { kind, awaited }] of status) {
      const from = this.people.get(rank);
      if (kind !== "waits" || !from) continue;
      for (const other of awaited) if (this.people.has(other)) arcs.push(this.#arc(from, this.people.get(other)));
    }
    this.layers.arcs.replaceChildren(...arcs);
  }

  #arc(a, b) {
    const way = Math.sign(b.x - a.x);
    const [x1, x2, y] = [a.x + way * a.r * 0.72, b.x - way * b.r * 0.72, a.y - a.r * 0.82];
    const high = y - clamp(Math.abs(b.x - a.x) * 0.22, 22, 74);
    const dx = (x2 - x1) * 0.22;
    const angle = (Math.atan2(y - high, dx) * 180) / Math.PI;
    return s("g", {}, s("path", { d: `M${x1.toFixed(1)} ${y.toFixed(1)}C${(x1 + dx).toFixed(1)} ${high.toFixed(1)} ${(x2 - dx).toFixed(1)} ${high.toFixed(1)} ${x2.toFixed(1)} ${y.toFixed(1)}`, class: "dkp-arc" }),
      s("path", { d: "M2 0L-8 4L-8 -4z", class: "dkp-head", transform: `${at(x2, y)} rotate(${angle.toFixed(1)})` }));
  }

  // -- under way ----------------------------------------------------------------------------

  #place(rank) {
    if (this.points.has(rank)) return this.points.get(rank);
    const stub = this.picture.stubs.find(({ role }) => (role === "server") === this.picture.rows.some(({ server }) => server === rank));
    return stub ? [stub.x, stub.y] : null;
  }

  // From where to where a beat goes; null: it is not drawn.
  #ends(beat) {
    let [a, b] = [this.#place(beat.src), this.#place(beat.dst)];
    const row = this.rows[beat.row];
    if (!a || !b || beat.src === beat.dst) return null;
    if (row?.slots) {
      const [x, y, w, h] = row.slots[Math.min(beat.slot ?? 0, row.slots.length - 1)];
      const spot = { push: [x + w / 2, y + h / 2], pull: row.wait, init: row.pill }[beat.kind];
      if (spot) b = spot;
      if (beat.kind === "weights") a = row.pill;
    }
    return [this.#edge(beat.src, a, b), this.#edge(beat.dst, b, a)];
  }

  // The edge of a worker or the scheduler instead of its middle.
  #edge(rank, from, to) {
    const length = Math.hypot(to[0] - from[0], to[1] - from[1]) || 1;
    const way = from.map((v, k) => (to[k] - v) / length);
    const boxed = this.picture.scheduler.some((node) => node.rank === rank);
    const far = boxed ? Math.min(64 / Math.abs(way[0]), 30 / Math.abs(way[1])) : (this.people.get(rank)?.r ?? -4) + 4;
    return from.map((v, k) => v + way[k] * far);
  }

  #stroke(beat) {
    if (beat.end === null || beat.refused) return "var(--dk-warning)";
    return beat.kind === "book" ? "var(--dk-muted)" : this.color(beat.src);
  }

  #line([a, b], beat, past = false) {
    const lost = beat.end === null;
    this.layers.flights.append(s("path", { d: `M${a.map((v) => v.toFixed(1))}L${b.map((v) => v.toFixed(1))}`,
      class: `dk-flight${lost ? " dk-lost" : past ? " dkp-past" : ""}`, stroke: this.#stroke(beat) }));
  }

  #rest(beat) {
    const ends = this.#ends(beat);
    if (!ends) return;
    this.#line(ends, beat, true);
    const [a, b] = ends;
    const angle = (Math.atan2(b[1] - a[1], b[0] - a[0]) * 180) / Math.PI;
    this.layers.flights.append(s("path", { d: "M1 0L-10 4.5L-10 -4.5z", fill: this.#stroke(beat), transform: `${at(...b)} rotate(${angle.toFixed(1)})` }));
  }

  #fly(beat, time) {
    if (beat.kind === "update") return this.#merge(beat, time);
    const ends = this.#ends(beat);
    if (!ends) return;
    this.#line(ends, beat);
    const f = beat.end === null ? 0.5 : ease(clamp((time - beat.begin) / Math.max(beat.end - beat.begin, 1e-12), 0, 1));
    const token = this.#token(beat);
    token.setAttribute("transform", at(...ends[0].map((v, k) => v + f * (ends[1][k] - v))));
    this.layers.tokens.append(token);
  }

  // What flies: a gradient with the version it was computed from, weights with theirs, a question.
  #token({ kind, src, dst, v = 0, nbytes = 0 }) {
    if (kind === "push") {
      const words = `∇v${v}`;
      const w = 8 * words.length + 10;
      return s("g", { class: "dkp-token" }, s("rect", { x: -w / 2, y: -9, width: w, height: 18, rx: 4, fill: this.color(src) }),
        this.#text(0, 4, words, "dkp-label", { fill: this.#ink(src) }));
    }
    if (kind === "weights" || (kind === "init" && nbytes)) {
      return s("g", { class: "dkp-token" }, this.#pill(0, 0, v));
    }
    const color = this.color(kind === "book" ? dst : src);
    return s("g", { class: "dkp-token" }, s("circle", { r: 6, class: "dkp-ring", stroke: color }));
  }

  // The gradients of an update go from their places into the value.
  #merge({ row, begin, end, late = [] }, time) {
    const place = this.rows[row];
    if (!place?.shown || end === null) return;
    const f = ease(clamp((time - begin) / Math.max(end - begin, 1e-12), 0, 1));
    late.forEach(([worker], i) => {
      const [x, y, w, h] = place.slots[Math.min(i, place.slots.length - 1)];
      const [px, py] = place.pill;
      this.layers.tokens.append(s("rect", { x: x + f * (px - w / 2 - x), y: y + f * (py - h / 2 - y), width: w, height: h, rx: 4,
        fill: this.color(worker), "fill-opacity": (1 - 0.6 * f).toFixed(2) }));
    });
  }
}
