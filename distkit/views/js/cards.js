// A card per rank: what it does, what it waits for, and the tensors it touches as heat strips.

import { h } from "./dom.js";
import { call } from "./painter.js";
import { paint, pin } from "./source.js";
import { figure, strip, tensor } from "./tooltip.js";

const ENDED = ["failed", "released"];

export class Cards {
  constructor(ranks, store) {
    this.store = store;
    this.cards = new Map(ranks.map((rank) => [rank, { root: empty(rank, store.name(rank)), key: "" }]));
    this.root = h("section", { class: "dk-cards", "aria-label": "ranks" },
      [...this.cards.values()].map(({ root }) => root));
  }

  // Only cards that say something new are built anew.
  show(ranks) {
    const scale = scales(ranks, this.store);
    for (const rank of ranks) {
      const card = this.cards.get(rank.rank);
      const [now, last] = [this.store.bars.get(rank.now), this.store.bars.get(rank.last)];
      const key = JSON.stringify([rank, now?.values, last?.values, scale]);
      if (!card || card.key === key) continue;
      card.key = key;
      card.root.dataset.doing = rank.doing;
      card.root.querySelector(".dk-doing").textContent = rank.doing;
      card.root.lastChild.replaceChildren(...body(rank, now, last, scale, this.store).filter(Boolean));
    }
  }
}

function empty(rank, name) {
  return h("article", { class: "dk-card", "data-rank": rank, style: paint(rank), "aria-label": name },
    h("header", {}, pin(rank), h("strong", {}, name), h("span", { class: "dk-doing" })),
    h("div", { class: "dk-card-body" }));
}

function body(rank, now, last, scale, store) {
  return [
    rank.call ? h("div", { class: "dk-call" }, h("code", {}, rank.call), line(rank.where)) : null,
    rank.reason ? h("p", { class: "dk-reason" }, rank.reason) : null,
    rank.call || !ENDED.includes(rank.doing) || !rank.where ? null : line(rank.where),
    now ? strips(now, now.values?.slice(0, 1), scale) : null,
    now?.kind === "recv" && now.dtype ? h("div", { class: "dk-tensor" }, "not written yet") : null,
    last ? h("div", { class: "dk-last" },
      h("div", { class: "dk-was" }, h("span", {}, "done"), h("span", {}, call(last, store)),
        line(last.where)),
      strips(last, last.values, scale)) : null,
  ];
}

// Where room is short, the end with the number stays.
function line(where) {
  return h("span", { class: "dk-where", title: where }, h("bdi", {}, where));
}

// Before and after, on the scale of all tensors of that shape.
function strips(bar, values, scale) {
  const [first, then] = values ?? [];
  const same = then && JSON.stringify(first?.values) === JSON.stringify(then.values); // a send
  const shown = [["before", same ? null : first], [same ? "values" : "after", then]]
    .filter(([, s]) => s?.values.length);
  if (!shown.length) return bar.dtype ? h("div", { class: "dk-tensor" }, tensor(bar)) : null;
  const most = scale[bar.shape] || largest(values);
  return h("div", { class: "dk-heat" }, shown.map(([when, summary], i) => [
    h("span", {}, when),
    h("div", {}, strip(summary, most), h("div", { class: "dk-caption" },
      h("span", {}, range(summary)), i ? null : h("span", { class: "dk-tensor" }, tensor(bar))))]));
}

function range({ values, size, min, max }) {
  return size <= 4 ? `[${values.map(figure).join(", ")}]` : `${figure(min)} to ${figure(max)}`;
}

// The largest value of each shape. What a receive finds in its buffer does not count: that may be
// memory nobody has written to.
function scales(ranks, store) {
  const scale = {};
  for (const id of ranks.flatMap(({ now, last }) => [now, last])) {
    const { shape, kind, values = [] } = store.bars.get(id) ?? {};
    const counted = values.slice(kind === "recv" ? 1 : 0).flatMap((s) => s?.values ?? []);
    const most = Math.max(0, ...counted.filter(Number.isFinite).map(Math.abs));
    scale[shape] = Math.max(scale[shape] ?? 0, most);
  }
  return scale;
}

const largest = (values) =>
  Math.max(1e-30, ...values.flatMap((s) => s?.values ?? []).filter(Number.isFinite).map(Math.abs));
