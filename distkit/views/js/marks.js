// Draws the marks of a moment as SVG, like renderer.py in Python.

import { s } from "./dom.js";

const NAMES = {
  ink: "var(--dk-fg)", paper: "var(--dk-bg)", muted: "var(--dk-muted)", code: "var(--dk-mono)",
  warning: "var(--dk-warning)", positive: "var(--dk-positive)", negative: "var(--dk-negative)",
  zero: "var(--dk-zero)",
};
const ease = (f) => f * f * (3 - 2 * f);
const at = (x, y) => `translate(${x.toFixed(2)} ${y.toFixed(2)})`;

// The page's color for a color name, or any other value unchanged.
function color(value, lane) {
  if (value === "rank") return `var(--dk-r${lane % 8})`;
  if (value === "label") return `var(--dk-i${lane % 8})`;
  if (value === "trace") return `var(--dk-t${lane % 8})`;
  const match = /^ink ([\d.]+)$/u.exec(value);
  return match ? `color-mix(in srgb, ${NAMES.ink} ${match[1]}%, ${NAMES.paper})`
    : NAMES[value] ?? value;
}

export class Marks {
  constructor(kind) {
    this.root = s("svg", { class: `dkm-svg ${kind}`, "aria-hidden": "true" });
    this.shown = new Map();
  }

  // scene: the result of Scene.plain() in marks.py; styles: attributes by class.
  load(scene, styles) {
    Object.assign(this, scene, { styles, cache: [], layers: [] });
    [this.shown, this.resting] = [new Map(), new Map()];
    this.root.setAttribute("viewBox", `0 0 ${scene.width} ${scene.height}`);
    for (const [keyframe, ...mark] of this.holds)
      this.resting.set(keyframe, [...this.resting.get(keyframe) ?? [], mark]);
    const numbers = this.marks.map(([, layer]) => layer)
      .concat(this.holds.map(([, , layer]) => layer));
    for (const layer of [...new Set(numbers)].sort((a, b) => a - b)) this.layers[layer] = s("g");
    this.root.replaceChildren(...this.layers.filter(Boolean));
  }

  // keyframe: the keyframe that has just ended, or -1.
  draw(time, keyframe) {
    const before = this.shown;
    this.shown = new Map();
    for (let i = 0; i < this.marks.length && this.marks[i][2] <= time; i++) {
      const [drawing, layer, begin, end, x, y, x2, y2, steady] = this.marks[i];
      if (end !== null && end <= time) continue;
      const element = this.#show(i, before, drawing, layer, x, y);
      if (x2 === undefined || end === null) continue;
      const elapsed = (time - begin) / (end - begin);
      const f = steady ? elapsed : ease(elapsed);
      element.setAttribute("transform", at(x + f * (x2 - x), y + f * (y2 - y)));
      if (!steady) element.setAttribute("class", "dkm-moving");
    }
    const resting = this.resting.get(keyframe) ?? [];
    resting.forEach((mark, i) => this.#show(`${keyframe} ${i}`, before, ...mark));
    for (const [key, element] of before) if (!this.shown.has(key)) element.remove();
  }

  #show(key, before, drawing, layer, x, y) {
    const element = before.get(key) ?? this.layers[layer].appendChild(this.#make(drawing));
    if (!before.has(key)) element.setAttribute("transform", at(x, y));
    element.drawing = drawing;
    this.shown.set(key, element);
    return element;
  }

  #make(n) {
    this.cache[n] ??= s("g", {}, ...this.drawings[n].map((i) => this.shape(this.shapes[i])));
    return this.cache[n].cloneNode(true);
  }

  shape([tag, style, lane, attributes, words]) {
    const own = Object.entries(this.styles[style] ?? {});
    const colored = own.map(([name, value]) => [name, color(value, lane)]);
    const all = Object.fromEntries([...colored, ...attributes]);
    const element = s(tag, { ...all, class: `mark-${style}` });
    element.textContent = words;
    return element;
  }

  get screenReaderText() {
    return [...this.shown.values()]
      .flatMap(({ drawing }) => this.drawings[drawing].map((i) => this.shapes[i]))
      .filter(([tag, style]) => tag === "title" && style === "aloud")
      .map(([, , , , words]) => words);
  }
}
