// The program's source, with a pin per rank at its current line. Below a line that calls one of
// distkit's algorithms, such as ring_all_reduce, the lines of the algorithm are inserted.

import { h, reducedMotion } from "./dom.js";
import { clamp } from "./numbers.js";
import { tokenize } from "./python.js";

const GLIDE = 220; // duration of a pin's motion [ms]
const MAX_COLORED = 3000; // maximum length of a file that is highlighted [lines]
const LINE_HEIGHT = 22; // height of a line [px]
const CONTEXT_LINES = 2; // lines shown before and after the pins in a called function

// A rank's number in its color; hatched for a blocked rank, and crossed out for a failed one.
export function pin(rank) {
  return h("span", { class: "dk-pin", "data-rank": rank, style: rankColors(rank) }, String(rank));
}

export const rankColors = (rank) => `--rank:var(--dk-r${rank % 8});--on-rank:var(--dk-i${rank % 8})`;

export class Source {
  constructor(ranks) {
    this.pins = new Map(ranks.map((rank) => [rank, pin(rank)]));
    Object.assign(this, { files: new Map(), pinPositions: new Map(), unfolded: true });
    this.tabs = h("div", { class: "dk-tabs", role: "tablist", "aria-label": "source files" });
    this.window = h("div", { class: "dk-window", role: "tabpanel" });
    this.nothing = h("p", { class: "dk-nothing" });
    this.root = h("section", { class: "dk-source", "aria-label": "source" },
      this.tabs, this.window, this.nothing);
    this.root.style.setProperty("--pins", clamp(ranks.length, 2, 4));
    this.sized = new ResizeObserver(() => { // the window may just have become visible
      const file = this.files.get(this.shown);
      if (file) this.#scrollIntoView(file, false);
    });
    this.sized.observe(this.window);
  }

  explain(reason) {
    if (this.nothing.textContent !== reason) this.nothing.textContent = reason;
  }

  dispose() {
    this.sized.disconnect();
  }

  add(sources) {
    for (const [label, text] of Object.entries(sources)) {
      if (this.files.has(label)) continue;
      const dots = h("span", { class: "dk-dots" });
      const tab = h("button", { type: "button", role: "tab", class: "dk-tab", "data-file": label,
        onclick: () => this.#open(label) }, label, dots);
      this.files.set(label, { label, text, tab, dots, rows: null, at: [] });
      this.tabs.append(tab);
    }
    this.tabs.hidden = !this.files.size;
    this.nothing.hidden = this.files.size > 0;
  }

  // marks: [{rank, where, inner, call, status, words}] of the moment; hot: the lines of findings.
  show(marks, hot) {
    for (const file of this.files.values()) file.at = [];
    const put = (where, mark) => {
      const [label, line] = parseLine(where);
      this.files.get(label)?.at.push({ ...mark, line });
    };
    for (const mark of marks) put(mark.where, mark);
    const count = (file) => file.at.length;
    const files = [...this.files.values()];
    const best = files.reduce((a, b) => (a && count(a) >= count(b) ? a : b), null);
    for (const file of files) this.#dot(file);
    const open = this.files.get(this.shown);
    const keepsFile = open && count(open) === count(best);
    for (const mark of marks) put(mark.inner, { ...mark, inner: "" }); // for users who open that file
    this.hot = hot;
    if (keepsFile) this.#place(open, true);
    else if (best) this.#open(best.label);
  }

  #dot({ tab, dots, at }) {
    const key = at.map(({ rank }) => rank).join();
    if (dots.dataset.ranks === key) return;
    dots.dataset.ranks = key;
    tab.style.order = at.length ? 0 : 1;
    dots.replaceChildren(...at.slice(0, 8).map(({ rank }) => h("i", { style: rankColors(rank) })));
  }

  #open(label) {
    const file = this.files.get(label);
    for (const { tab, label: other } of this.files.values())
      tab.setAttribute("aria-selected", String(other === label));
    const animated = this.shown === label;
    if (!animated) this.window.replaceChildren(h("div", { class: "dk-file" }, this.#rows(file)));
    this.shown = label;
    this.#place(file, animated);
  }

  #rows(file) {
    return (file.rows ??= rows(file.text));
  }

  #row(file, line) {
    const all = this.#rows(file);
    return all[clamp(line, 1, all.length) - 1];
  }

  #place(file, animated) {
    const before = this.pinPositions; // measured once: measuring again would force a layout
    for (const element of this.pins.values()) element.remove();
    for (const row of this.window.querySelectorAll(".dk-here, .dk-hot")) {
      row.classList.remove("dk-here", "dk-hot");
      delete row.lastChild.dataset.at;
    }
    this.#fold(file);
    // pins of ranks that are not paused are first, so that they are always visible
    const unpaused = file.at.filter(({ status }) => status !== "paused");
    const here = new Map();
    for (const mark of [...unpaused, ...file.at.filter((mark) => !unpaused.includes(mark))]) {
      const row = this.#pinRow(file, mark);
      here.set(row, [...here.get(row) ?? [], mark]);
      const element = this.pins.get(mark.rank);
      Object.assign(element.dataset, { status: mark.status, line: row.dataset.line });
      element.title = mark.words;
      row.firstChild.lastChild.before(element);
    }
    for (const mark of file.at) this.#row(file, mark.line).classList.add("dk-here");
    for (const [row, marks] of here) {
      row.classList.add("dk-here");
      row.lastChild.dataset.at = activity(marks);
      row.firstChild.lastChild.textContent = `+${row.firstChild.childElementCount - 4}`;
    }
    for (const where of this.hot ?? []) this.#markFinding(file, where);
    const shown = this.window.querySelectorAll(".dk-row, .dk-fold > button").length;
    this.root.style.setProperty("--lines", shown);
    this.pinPositions = new Map([...this.pins].map(([rank, element]) => [rank, pinPosition(element)]));
    this.#scrollIntoView(file, animated);
    if (!animated || reducedMotion()) return;
    for (const [rank, element] of this.pins) glide(element, before.get(rank), this.pinPositions.get(rank));
  }

  // The row of a rank's pin: in the called function if that is unfolded.
  #pinRow(file, { line, inner }) {
    const [label, within] = parseLine(inner);
    const called = this.unfolded && label !== file.label && this.files.get(label);
    return called ? this.#row(called, within) : this.#row(file, line);
  }

  // Marks a line of a finding, and the lines from which its function was called.
  #markFinding(file, where) {
    const [label, line] = parseLine(where);
    const target = this.files.get(label);
    const hot = target && (target === file || this.unfolded) ? [this.#row(target, line)] : [];
    const callers = file.at.filter((mark) => mark.inner === where);
    for (const row of [...hot, ...callers.map((mark) => this.#row(file, mark.line))])
      row.classList.add("dk-hot");
  }

  // Below each calling line, inserts the lines of the called function around the pins.
  #fold(file) {
    for (const fold of this.window.querySelectorAll(".dk-fold")) fold.remove();
    const called = new Map();
    for (const { line, inner } of file.at) {
      const [label, within] = parseLine(inner);
      if (!this.files.has(label) || label === file.label) continue;
      const key = `${line} ${label}`;
      called.set(key, { line, label, lines: [...called.get(key)?.lines ?? [], within] });
    }
    for (const { line, label, lines } of called.values()) {
      const target = this.files.get(label);
      const from = Math.max(0, Math.min(...lines) - 1 - CONTEXT_LINES);
      const context = this.#rows(target).slice(from, Math.max(...lines) + 1);
      const head = h("button", { type: "button", "aria-expanded": String(this.unfolded) },
        `in ${enclosingFunction(target.text, Math.min(...lines))}`, h("small", {}, label));
      head.addEventListener("click", () => {
        this.unfolded = !this.unfolded;
        this.#place(file, false);
      });
      const shown = this.unfolded ? context : null;
      this.#row(file, line).after(h("div", { class: "dk-fold" }, head, shown));
    }
  }

  // Scrolls the window, not the page, until the pins are visible with some context.
  #scrollIntoView(file, animated) {
    if (!this.window.clientHeight) return;
    const focused = this.#focusRows(file);
    if (!focused.length) return;
    const { scrollTop, clientHeight: height } = this.window;
    const [first, last] = [Math.min(...focused.map((row) => row.offsetTop)),
      Math.max(...focused.map((row) => row.offsetTop + row.offsetHeight)) + LINE_HEIGHT / 2];
    if (first - 2 * LINE_HEIGHT >= scrollTop && last <= scrollTop + height) return;
    const top = last - first <= height ? (first + last - height) / 2 : last - height;
    const behavior = animated && !reducedMotion() ? "smooth" : "auto";
    this.window.scrollTo({ top: Math.max(0, top), behavior });
  }

  // The rows with pins, or else the first line of a finding, or else the first communication call.
  #focusRows(file) {
    const rows = (mark) => [this.#row(file, mark.line), this.#pinRow(file, mark)];
    if (file.at.length) return file.at.flatMap(rows);
    const rowOf = (kind) => this.window.querySelector(kind)?.closest(".dk-row");
    return [rowOf(".dk-hot") ?? rowOf(".dk-py-communication")].filter(Boolean);
  }
}

function parseLine(where = "") {
  const at = where.lastIndexOf(":");
  return [where.slice(0, at), Number(where.slice(at + 1))];
}

// The activity of ranks at a line: "paused before send", or "0, 2 stopped in send · 1 waits in recv".
function activity(marks) {
  const ranksByText = {};
  for (const { rank, status, scheduled, call = "" } of [...marks].sort((a, b) => a.rank - b.rank)) {
    const verb = scheduled ? "paused before" : status === "blocked" ? "waits in" : `${status} in`;
    (ranksByText[call ? `${verb} ${call.replace(/\(.*/su, "")}` : status] ??= []).push(rank);
  }
  const all = Object.entries(ranksByText);
  const numbered = ([words, ranks]) => (all.length > 1 ? `${ranks.join(", ")} ${words}` : words);
  return all.map(numbered).join(" · ");
}

// The function that contains a line of a file.
function enclosingFunction(text, line) {
  const heads = text.split("\n").slice(0, line).map((row) => /^(?:async )?def (\w+)/u.exec(row));
  return heads.findLast(Boolean)?.[1] ?? "the module";
}

function rows(text) {
  const plain = text.replace(/\n$/, "").split("\n");
  const colors = plain.length <= MAX_COLORED;
  const lines = colors ? tokenize(plain.join("\n")) : plain.map((line) => [["", line]]);
  const token = ([kind, piece]) => (kind ? h("span", { class: `dk-py-${kind}` }, piece) : piece);
  return lines.map((tokens, i) => h("div",
    { class: "dk-row", "data-line": i + 1, style: `--indent:${plain[i].search(/\S|$/u)}` },
    h("span", { class: "dk-pins" }, h("span", { class: "dk-more" })),
    h("span", { class: "dk-no" }, String(i + 1)), h("code", {}, tokens.map(token))));
}

// Position of a pin within its file, independent of scrolling.
function pinPosition(element) {
  return element.offsetParent ? [element.offsetLeft, element.offsetTop] : null;
}

function glide(element, before, now) {
  if (!before || !now || (before[0] === now[0] && before[1] === now[1])) return;
  const from = `translate(${before[0] - now[0]}px, ${before[1] - now[1]}px)`;
  element.animate([{ transform: from }, { transform: "none" }], { duration: GLIDE, easing: "ease-out" });
}
