// Tensors before and after each operation: a slider over the operations, the ranks side by side.

import { fit } from "./canvas.js";
import { dot, h, muted } from "./dom.js";
import { clamp, figure, grouped, humanSeconds, oddities, plural } from "./numbers.js";
import { Series } from "./sheet.js";
import {
  axis, bounds, heat, histogram, key, LENGTH, range, told, verdict, wrong,
} from "./values.js";
import { d3 } from "./vendor/d3.js";

const SIDE_BY_SIDE = 10; // columns, beyond which before stands above after

export class Tensors extends Series {
  constructor(model, el) {
    super(model, el, "tensors", "Tensors before and after each operation. " +
      "Arrow left and right go from operation to operation, Home and End to the ends.");
  }

  build() {
    this.ops = new Map(this.picture.ops.map((op) => [op.id, op]));
    this.only = "";
    this.slides("operation");
    this.select = h("select", { "aria-label": "operations of", class: "dkv-select" });
    this.select.addEventListener("change", () => {
      this.only = this.select.value;
      this.go(0);
    });
    this.bar = h("canvas", { class: "dkv-bar", "aria-hidden": "true" });
    this.row = h("div", { class: "dkv-sliding" }, this.arrows,
      h("div", { class: "dkv-track" }, this.bar, this.slider), this.select);
    this.title = h("div", { class: "dkv-what" });
    this.verdicts = h("ul", { class: "dkv-verdicts" });
    this.cards = h("div", { class: "dkv-cards" });
    this.body.append(this.row, this.title, this.verdicts, this.cards);
  }

  merge({ ops, ...frame }) {
    for (const op of ops) this.ops.set(op.id, op);
    this.picture = { ...this.picture, ...frame };
  }

  get list() {
    const all = [...this.ops.values()].sort((a, b) => a.n - b.n);
    const has = (op) => op.ranks.some((r) => String(r.rank) === this.only);
    return this.only === "" ? all : all.filter(has);
  }

  nameOf(op) {
    return op.id;
  }

  passed(op) {
    return op.id === this.chosen;
  }

  sentence(op, at) {
    const before = op.before.text && !op.message ? `before: ${op.before.text}` : "";
    const words = `operation ${at + 1} of ${this.list.length}: ${op.title} ${op.tensor}`;
    return [words, before, op.after.text].filter(Boolean).join("; ");
  }

  draw() {
    const { list, at } = this;
    const op = list[at];
    this.row.hidden = list.length < 2 && this.only === "";
    this.#choices();
    if (!op) {
      this.title.replaceChildren(h("p", { class: "dkv-empty" }, this.picture.live
        ? "waiting for the first message" : "no tensor values were recorded"));
      return [this.verdicts, this.cards].forEach((part) => part.replaceChildren());
    }
    this.slide();
    this.title.replaceChildren(h("strong", {}, op.title),
      h("span", { class: "dk-code" }, op.tensor),
      h("span", { class: "dkv-muted dk-code" }, op.where),
      muted(`operation ${at + 1} of ${list.length}, at ${humanSeconds(op.time)}`),
      op.most ? key(op.most, this.look) : "");
    this.verdicts.replaceChildren(...[["before", op.before], ["after", op.after]]
      .filter(([, v]) => v.word).map(([when, v]) => verdict(v, op.message ? "" : when)));
    const most = d3.max(op.ranks, (r) => r.after?.columns ?? r.before?.columns ?? 1);
    const [across, width] = this.columns(op.ranks.length, most > SIDE_BY_SIDE ? 250 : 264, 14);
    this.cards.style.gridTemplateColumns = `repeat(${across}, minmax(0, 450px))`;
    this.cards.replaceChildren(...op.ranks.map((r) => this.#card(op, r, Math.min(420, width) - 30)),
      op.more ? h("p", { class: "dkv-muted" }, `and ${plural(op.more, "more rank")}`) : "");
    this.#overview(list, at);
  }

  #choices() {
    const ranks = [...this.ops.values()].flatMap((op) => op.ranks.map((r) => [r.rank, r.name]));
    const names = [...new Map(ranks)].sort(([a], [b]) => a - b);
    if (this.select.options.length === names.length + 1) return;
    this.select.replaceChildren(...[["", "all ranks"], ...names]
      .map(([value, name]) => h("option", { value }, name)));
    this.select.value = this.only;
  }

  // A tick for each operation above the slider: tall for collectives, red where ranks should agree.
  #overview(list, at) {
    const [width, height] = [this.slider.clientWidth, 12];
    const c = fit(this.bar, width, height);
    c.clearRect(0, 0, width, height);
    const x = d3.scaleLinear([0, Math.max(1, list.length - 1)], [8, width - 8]);
    const wide = clamp((width - 16) / list.length - 1, 1, 5);
    list.forEach((op, i) => {
      const plain = op.message ? this.color(op.ranks[0].lane) : this.look.muted;
      c.fillStyle = wrong(op.after) ? this.look.warning : plain;
      c.globalAlpha = i === at ? 1 : 0.45;
      const tall = op.message ? 5 : 9;
      c.fillRect(x(i) - wide / 2, height - tall, wide, tall);
    });
  }

  #card(op, r, width) {
    const { name, role, before, after, off } = r;
    const stacked = Math.max(before?.columns ?? 0, after?.columns ?? 0) > SIDE_BY_SIDE;
    const color = this.color(r.lane);
    const words = [role, before && `before ${told(before)}`, after && `after ${told(after)}`];
    return h("section", { class: off.length ? "dkv-card dkv-off" : "dkv-card", "data-rank": r.rank,
      style: `--dk-own:${color}`, "aria-label": `${name}: ${words.filter(Boolean).join("; ")}` },
    h("h4", {}, dot(color), name, h("small", {}, role)),
    h("div", { class: stacked ? "dkv-maps dkv-stacked" : "dkv-maps" },
      this.#maps(op, r, width, stacked)),
    before || after ? this.#numbers(op, r, color, width)
      : h("p", { class: "dkv-muted" }, "its values were not recorded"));
  }

  // Before and after as heat maps; cells that are wrong, or that changed where few did, are framed.
  #maps(op, { before, after, off, changed }, width, stacked) {
    const { look } = this;
    const each = stacked || !(before && after) ? width : (width - 26) / 2;
    const some = op.ranks.every((r) => r.changed.length <= 0.35 * (r.after?.values.length ?? 0));
    const marked = off.length ? off : some ? changed : [];
    const map = (when, s, marks, color) => {
      if (!s) return "";
      const wide = Math.min(each, stacked || s.columns > SIDE_BY_SIDE ? 350 : 150);
      const drawn = heat(s, { look, most: op.most, width: wide, high: 220, marked: marks, color });
      return h("div", { class: "dkv-map" }, h("span", {}, when), drawn);
    };
    const arrow = h("span", { class: "dkv-then", "aria-hidden": "true" }, "→");
    return [map(op.message && !after ? "sent" : "before", before, [], null),
      before && after && !stacked ? arrow : "",
      map("after", after, marked, off.length ? look.warning : null)];
  }

  #numbers(op, { before, after, compared, changed }, color, width) {
    const series = [
      before && { values: before.values, color: this.look.muted, fill: !after },
      after && { values: after.values, color, fill: true }].filter(Boolean);
    const span = range(op.ranks.flatMap((r) => [r.before?.values ?? [], r.after?.values ?? []]));
    const few = d3.max(series, (s) => s.values.length) < 8;
    const row = (when, s) => s && [h("dt", {}, when), h("dd", {},
      `${bounds(s)} · `, h("span", { class: "dkv-why", title: LENGTH }, "norm"),
      ` ${figure(s.norm)}`,
      oddities(s) ? h("b", { class: "dk-alarm" }, ` · ${oddities(s)}`) : "")];
    const { values, size } = after ?? before;
    const part = values.length < size
      ? `${values.length} of ${grouped(size)} values, at equal distances`
      : `${size > 1 ? "all " : ""}${plural(size, "value")}`;
    const drawn = few ? "" : histogram(series, span, { width, height: 44, label: "histogram" });
    return [drawn, few ? "" : axis(span),
      h("dl", { class: "dkv-figures" }, row(op.message && !after ? "sent" : "before", before),
        row("after", after), h("dt", {}, "shown"),
        h("dd", {}, part, compared ? `, ${changed.length || "none"} changed` : ""))];
  }
}
