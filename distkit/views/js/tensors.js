// Tensors before and after each operation: a slider over the operations, the ranks side by side.

import { fit } from "./canvas.js";
import { h } from "./dom.js";
import { clamp, humanSeconds, plural } from "./numbers.js";
import { axis, bounds, figure, heat, histogram, key, oddities, range, Sheet, spoken } from "./tensorsparts.js";
import { d3 } from "./vendor/d3.js";

const SIDE_BY_SIDE = 10; // columns, beyond which before stands above after

export class Tensors extends Sheet {
  constructor(model, el) {
    super(model, el, "tensors", "Tensors before and after each operation. " +
      "Arrow left and right go from operation to operation, Home and End to the first and the last.");
  }

  build() {
    this.ops = new Map(this.picture.ops.map((op) => [op.id, op]));
    [this.chosen, this.only, this.follow] = [null, "", this.picture.live];
    this.slider = h("input", { type: "range", class: "dkv-slider", min: 0, step: 1, "aria-label": "operation" });
    const button = (label, sign, by) => {
      const b = h("button", { type: "button", "aria-label": label, title: label }, sign);
      b.addEventListener("click", () => this.step(by));
      return b;
    };
    this.select = h("select", { "aria-label": "operations of", class: "dkv-select" });
    this.bar = h("canvas", { class: "dkv-bar", "aria-hidden": "true" });
    this.row = h("div", { class: "dkv-sliding" }, h("div", { class: "dk-tools" },
      button("previous operation", "◀", -1), button("next operation", "▶", 1)),
    h("div", { class: "dkv-track" }, this.bar, this.slider), this.select);
    this.title = h("div", { class: "dkv-what" });
    this.verdicts = h("ul", { class: "dkv-verdicts" });
    this.cards = h("div", { class: "dkv-cards" });
    this.body.append(this.row, this.title, this.verdicts, this.cards);
    this.slider.addEventListener("input", () => this.go(Number(this.slider.value)));
    this.select.addEventListener("change", () => { this.only = this.select.value; this.go(0); });
    this.root.addEventListener("keydown", (e) => this.typed(e));
  }

  merge({ ops, ...frame }) {
    for (const op of ops) this.ops.set(op.id, op);
    this.picture = { ...this.picture, ...frame };
  }

  get list() {
    const all = [...this.ops.values()].sort((a, b) => a.n - b.n);
    return this.only === "" ? all : all.filter((op) => op.ranks.some((r) => String(r.rank) === this.only));
  }

  get at() {
    const { list } = this;
    const found = list.findIndex((op) => op.id === this.chosen);
    return found >= 0 ? found : this.follow ? list.length - 1 : 0;
  }

  go(position) {
    const { list } = this;
    const at = clamp(position, 0, list.length - 1);
    this.follow = this.picture.live && at === list.length - 1;
    this.chosen = this.follow ? null : list[at]?.id ?? null;
    this.spoken.textContent = list[at] ? sentence(list[at], at, list.length) : "";
    this.later();
  }

  step(by) {
    this.go(this.at + by);
  }

  typed(e) {
    const act = { ArrowLeft: () => this.step(-1), ArrowRight: () => this.step(1),
      Home: () => this.go(0), End: () => this.go(this.list.length - 1) }[e.key];
    if (!act || e.target === this.select || e.ctrlKey || e.metaKey || e.altKey) return;
    e.preventDefault();
    e.stopPropagation(); // JupyterLab must not take the arrows for itself
    act();
  }

  draw() {
    const { list, at } = this;
    const op = list[at];
    this.row.hidden = list.length < 2 && this.only === "";
    this.#choices();
    if (!op) {
      this.title.replaceChildren(h("p", { class: "dkv-empty" }, this.picture.live
        ? "waiting for the first message" : "no values of tensors were recorded"));
      return [this.verdicts, this.cards].forEach((part) => part.replaceChildren());
    }
    this.slider.max = list.length - 1;
    this.slider.value = at;
    this.slider.setAttribute("aria-valuetext", sentence(op, at, list.length));
    this.title.replaceChildren(h("strong", {}, op.title), h("span", { class: "dk-code" }, op.tensor),
      h("span", { class: "dkv-muted dk-code" }, op.where),
      h("span", { class: "dkv-muted" }, `operation ${at + 1} of ${list.length}, at ${humanSeconds(op.time)}`),
      op.most ? key(op.most, this.look) : "");
    this.verdicts.replaceChildren(...[["before", op.before], ["after", op.after]]
      .filter(([, v]) => v.word).map(([when, v]) => verdict(op.message ? "" : when, v)));
    const most = d3.max(op.ranks, (r) => r.after?.columns ?? r.before?.columns ?? 1);
    const least = most > SIDE_BY_SIDE ? 250 : 264;
    const across = Math.max(1, Math.min(op.ranks.length, Math.floor((this.body.clientWidth + 14) / (least + 14))));
    this.cards.style.gridTemplateColumns = `repeat(${across}, minmax(0, 450px))`;
    const width = Math.min(420, (this.body.clientWidth - 14 * (across - 1)) / across);
    this.cards.replaceChildren(...op.ranks.map((r) => this.#card(op, r, width - 30)),
      op.more ? h("p", { class: "dkv-muted" }, `and ${plural(op.more, "more rank")}`) : "");
    this.#overview(list, at);
  }

  #choices() {
    const names = new Map([...this.ops.values()].flatMap((op) => op.ranks.map((r) => [r.rank, r.name])));
    if (this.select.options.length === names.size + 1) return;
    const options = [...names].sort(([a], [b]) => a - b).map(([rank, name]) => h("option", { value: rank }, name));
    this.select.replaceChildren(h("option", { value: "" }, "all ranks"), ...options);
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
      const wrong = op.after.word === "different" && op.after.expected;
      c.fillStyle = wrong ? this.look.warning : op.message ? this.color(op.ranks[0].lane) : this.look.muted;
      c.globalAlpha = i === at ? 1 : 0.45;
      const tall = op.message ? 5 : 9;
      c.fillRect(x(i) - wide / 2, height - tall, wide, tall);
    });
  }

  #card(op, r, width) {
    const { look } = this;
    const stacked = Math.max(r.before?.columns ?? 0, r.after?.columns ?? 0) > SIDE_BY_SIDE;
    const each = stacked || !(r.before && r.after) ? width : (width - 26) / 2;
    const some = op.ranks.every((o) => o.changed.length <= 0.35 * (o.after?.values.length ?? 0));
    const map = (summary, marked, color) => heat(summary, { look, most: op.most, width: Math.min(each, 150 + 200 * (stacked || summary.columns > SIDE_BY_SIDE)), high: 220, marked, color });
    const one = (when, s, marked, color) => s && h("div", { class: "dkv-map" }, h("span", {}, when), map(s, marked, color));
    const send = op.message && !r.after;
    const color = this.color(r.lane);
    return h("section", { class: r.off.length ? "dkv-card dkv-off" : "dkv-card", "data-rank": r.rank, style: `--dk-own:${color}`,
      "aria-label": `${r.name}: ${[r.role, r.before && `before ${spoken(r.before)}`, r.after && `after ${spoken(r.after)}`].filter(Boolean).join("; ")}` },
    h("h4", {}, h("span", { class: "dk-dot", style: `background:${color}` }), r.name, h("small", {}, r.role)),
    h("div", { class: stacked ? "dkv-maps dkv-stacked" : "dkv-maps" }, one(send ? "sent" : "before", r.before, [], null) ?? "",
      r.before && r.after && !stacked ? h("span", { class: "dkv-then", "aria-hidden": "true" }, "→") : "",
      one("after", r.after, r.off.length ? r.off : some ? r.changed : [], r.off.length ? look.warning : null) ?? ""),
    !r.before && !r.after ? h("p", { class: "dkv-muted" }, "its values were not looked at") : this.#numbers(op, r, color, width));
  }

  #numbers(op, r, color, width) {
    const series = [
      r.before && { values: r.before.values, color: this.look.muted, fill: !r.after },
      r.after && { values: r.after.values, color, fill: true }].filter(Boolean);
    const span = range(op.ranks.flatMap((o) => [o.before?.values ?? [], o.after?.values ?? []]));
    const few = d3.max(series, (s) => s.values.length) < 8;
    const rows = [["before", r.before], ["after", r.after]].filter(([, s]) => s).map(([when, s]) => [
      h("dt", {}, op.message && !r.after ? "sent" : when),
      h("dd", {}, `${bounds(s)} · norm ${figure(s.norm)}`,
        oddities(s) ? h("b", { class: "dk-alarm" }, ` · ${oddities(s)}`) : "")]);
    const shown = (r.after ?? r.before);
    const part = shown.values.length < shown.size ? `${shown.values.length} of ${shown.size.toLocaleString("en")} values` : plural(shown.size, "value");
    return [few ? "" : [histogram(series, span, { width, height: 44, label: "histogram" }), axis(span)],
      h("dl", { class: "dkv-figures" }, rows, h("dt", {}, "shown"), h("dd", {}, part,
        r.compared ? `, ${r.changed.length ? r.changed.length : "none"} changed` : ""))];
  }
}

function verdict(when, { word, text, expected }) {
  const wrong = word === "different" && expected;
  return h("li", { class: word === "same" ? "dkv-same" : wrong ? "dkv-wrong" : "dk-different" },
    h("b", { "aria-hidden": "true" }, word === "same" ? "=" : "≠"),
    when ? h("span", { class: "dkv-muted" }, when) : "", h("span", {}, text));
}

function sentence(op, at, n) {
  const words = [op.before.text && !op.message ? `before: ${op.before.text}` : "", op.after.text].filter(Boolean);
  return [`operation ${at + 1} of ${n}: ${op.title} ${op.tensor}`, ...words].join("; ");
}
