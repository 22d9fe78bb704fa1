// The program's source, with a pin per rank at the line where it is.

import { h, still } from "./dom.js";
import { clamp } from "./numbers.js";
import { tokenize } from "./python.js";

const GLIDE = 220; // milliseconds
const COLOURED = 3000; // longer files stay plain

// A rank's number in its colour; blocked ones are hollow and hatched, failed ones crossed.
export function pin(rank) {
  return h("span", { class: "dk-pin", "data-rank": rank, style: paint(rank) }, String(rank));
}

export const paint = (rank) => `--rank:var(--dk-r${rank % 8});--on-rank:var(--dk-i${rank % 8})`;

export class Source {
  constructor(ranks) {
    this.pins = new Map(ranks.map((rank) => [rank, pin(rank)]));
    this.files = new Map();
    this.spots = new Map();
    this.tabs = h("div", { class: "dk-tabs", role: "tablist", "aria-label": "source files" });
    this.window = h("div", { class: "dk-window", role: "tabpanel" });
    this.nothing = h("p", { class: "dk-nothing" });
    this.root = h("section", { class: "dk-source", "aria-label": "source" },
      this.tabs, this.window, this.nothing);
    this.root.style.setProperty("--pins", clamp(ranks.length, 2, 4));
    this.window.addEventListener("scroll", () => this.#fade(), { passive: true });
    this.sized = new ResizeObserver(() => this.#resize());
    this.sized.observe(this.window);
  }

  // Why there is no source, where there is none.
  explain(why) {
    if (this.nothing.textContent !== why) this.nothing.textContent = why;
  }

  dispose() {
    this.sized.disconnect();
  }

  // Lines that go on beyond the edge fade out there.
  #fade() {
    const { scrollLeft, clientWidth, scrollWidth } = this.window;
    this.root.dataset.more = scrollWidth - clientWidth - scrollLeft > 4;
  }

  #resize() {
    this.#fade();
    const file = this.files.get(this.shown);
    if (file) this.#keepInSight(file, false); // it may only now be on the page
  }

  // Files that are new.
  add(sources) {
    for (const [label, text] of Object.entries(sources)) {
      const dots = h("span", { class: "dk-dots" });
      const tab = h("button", { type: "button", role: "tab", class: "dk-tab", "data-file": label },
        label, dots);
      tab.addEventListener("click", () => this.#open(label));
      this.files.set(label, { label, text, tab, dots, rows: null, at: [] });
      this.tabs.append(tab);
    }
    this.tabs.hidden = !this.files.size;
    this.nothing.hidden = this.files.size > 0;
  }

  // marks: [{rank, where, doing, words}] of the moment; hot: lines of a finding; back: no gliding.
  show(marks, hot) {
    for (const file of this.files.values()) file.at = [];
    for (const mark of marks) {
      const [label, line] = place(mark.where);
      this.files.get(label)?.at.push({ ...mark, line });
    }
    const most = Math.max(0, ...[...this.files.values()].map((file) => file.at.length));
    const open = this.files.get(this.shown);
    const best = [...this.files.values()].find((file) => file.at.length === most);
    for (const file of this.files.values()) this.#dot(file);
    this.hot = hot;
    if (open && open.at.length === most) this.#place(open, true);
    else if (best) this.#open(best.label);
  }

  #dot({ dots, at }) {
    const key = at.map(({ rank }) => rank).join();
    if (dots.dataset.ranks === key) return;
    dots.dataset.ranks = key;
    dots.replaceChildren(...at.slice(0, 8).map(({ rank }) => h("i", { style: paint(rank) })));
  }

  #open(label) {
    const file = this.files.get(label);
    file.rows ??= rows(file.text);
    for (const { tab, label: other } of this.files.values()) {
      tab.setAttribute("aria-selected", String(other === label));
    }
    if (this.shown !== label) this.window.replaceChildren(h("div", { class: "dk-file" }, file.rows));
    const glides = this.shown === label;
    this.shown = label;
    this.root.style.setProperty("--lines", file.rows.length);
    this.#place(file, glides);
  }

  #place(file, glides) {
    const before = this.spots; // measured once: asking the page now would cost a layout
    for (const at of this.pins.values()) at.remove();
    for (const row of this.window.querySelectorAll(".dk-here, .dk-hot")) {
      row.classList.remove("dk-here", "dk-hot");
    }
    const waiting = file.at.filter(({ doing }) => doing !== "paused"); // in sight in a crowd
    for (const mark of [...waiting, ...file.at.filter((mark) => !waiting.includes(mark))]) {
      const at = this.pins.get(mark.rank);
      const row = file.rows[clamp(mark.line, 1, file.rows.length) - 1];
      Object.assign(at.dataset, { doing: mark.doing, line: mark.line });
      at.title = mark.words;
      row.classList.add("dk-here");
      row.firstChild.lastChild.before(at);
    }
    for (const { firstChild: pins } of this.window.querySelectorAll(".dk-here")) {
      pins.lastChild.textContent = `+${pins.childElementCount - 4}`;
    }
    for (const where of this.hot ?? []) {
      const [label, line] = place(where);
      if (label === file.label) file.rows[line - 1]?.classList.add("dk-hot");
    }
    this.spots = new Map([...this.pins].map(([rank, at]) => [rank, spot(at)]));
    this.#keepInSight(file, glides);
    this.#fade();
    if (!glides || still()) return;
    for (const [rank, at] of this.pins) glide(at, before.get(rank), this.spots.get(rank));
  }

  // The window scrolls, and never the page, until the pins are in it with some lines around.
  #keepInSight(file, glides) {
    const all = file.rows;
    if (!this.window.clientHeight) return;
    const tops = this.#worthSeeing(file).map((row) => row.offsetTop);
    if (!tops.length) return;
    const [height, line] = [this.window.clientHeight, all[0].offsetHeight];
    const [first, last] = [Math.min(...tops) - 3 * line, Math.max(...tops) + 4 * line];
    const { scrollTop } = this.window;
    if (first >= scrollTop && last <= scrollTop + height) return;
    const fits = last - first <= height;
    const top = fits ? (first + last - height) / 2 : tops[0] - height / 2;
    this.window.scrollTo({ top: Math.max(0, top), behavior: glides && !still() ? "smooth" : "auto" });
  }

  // The rows with markers; without any, the first that is hot or communicates.
  #worthSeeing({ at, rows: all }) {
    if (at.length) return at.map(({ line }) => all[clamp(line, 1, all.length) - 1]);
    const first = this.window.querySelector(".dk-hot") ?? this.window.querySelector(".dk-py-talk")?.closest(".dk-row");
    return first ? [first] : [];
  }
}

function place(where = "") {
  const at = where.lastIndexOf(":");
  return [where.slice(0, at), Number(where.slice(at + 1))];
}

function rows(text) {
  const plain = text.replace(/\n$/, "").split("\n");
  const lines = plain.length > COLOURED ? plain.map((line) => [["", line]]) : tokenize(plain.join("\n"));
  return lines.map((tokens, i) => h("div", { class: "dk-row", "data-line": i + 1 },
    h("span", { class: "dk-pins" }, h("span", { class: "dk-more" })), h("span", { class: "dk-no" }, String(i + 1)),
    h("code", {}, tokens.map(([kind, piece]) =>
      (kind ? h("span", { class: `dk-py-${kind}` }, piece) : piece)))));
}

// Where a pin is within its file, however far the window is scrolled.
function spot(at) {
  return at.offsetParent ? [at.offsetLeft, at.offsetTop] : null;
}

function glide(at, before, now) {
  if (!before || !now || (before[0] === now[0] && before[1] === now[1])) return;
  const from = `translate(${before[0] - now[0]}px, ${before[1] - now[1]}px)`;
  at.animate([{ transform: from }, { transform: "none" }], { duration: GLIDE, easing: "ease-out" });
}
