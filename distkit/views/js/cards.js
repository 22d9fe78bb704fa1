// A card per rank: its activity, what it waits for, and its tensors as heat strips.

import { h, reducedMotion } from "./dom.js";
import { call } from "./renderer.js";
import { rankColors, pin } from "./source.js";
import { figure, largest } from "./numbers.js";
import { strip, tensor } from "./tooltip.js";

const FLASH = 700; // duration of the highlight of a changed card [ms]
const FLASH_COLOR = "color-mix(in srgb, var(--rank) 30%, transparent)";

export class Cards {
  constructor(ranks, store) {
    this.store = store;
    const create = (rank) => ({ root: emptyCard(rank, store.name(rank), store.host(rank)), key: "" });
    this.cards = new Map(ranks.map((rank) => [rank, create(rank)]));
    this.root = h("section", { class: "dk-cards", "aria-label": "ranks" },
      [...this.cards.values()].map(({ root }) => root));
  }

  // Rebuilds only changed cards.
  show(ranks) {
    const scale = scales(ranks, this.store);
    for (const rank of ranks) {
      const card = this.cards.get(rank.rank);
      const [now, last] = [this.store.find(rank.now), this.store.find(rank.last)];
      const key = JSON.stringify([rank, now?.values, last?.values, scale]);
      if (!card || card.key === key) continue;
      if (card.key && !reducedMotion()) card.root.animate([{ background: FLASH_COLOR }, {}], FLASH);
      card.key = key;
      card.root.dataset.status = rank.status;
      const element = (name) => card.root.querySelector(`.dk-${name}`);
      element("state").textContent = rank.status;
      element("where").textContent = rank.where ?? "";
      element("where").title = rank.inner ?? "";
      const parts = body(rank, now, last, scale, this.store);
      card.root.lastChild.replaceChildren(...parts.filter(Boolean));
    }
  }
}

function emptyCard(rank, name, host) {
  const attributes = { class: "dk-card", "data-rank": rank, style: rankColors(rank), "aria-label": name };
  return h("article", attributes,
    h("header", {}, pin(rank), h("strong", {}, name),
      host ? h("span", { class: "dk-host" }, `on ${host}`) : null,
      h("span", { class: "dk-where" }), h("span", { class: "dk-state" })),
    h("div", { class: "dk-card-body" }));
}

function body(rank, now, last, scale, store) {
  const tensorOf = (bar) => (bar?.dtype ? h("span", { class: "dk-tensor" }, tensor(bar)) : null);
  const unwritten = now?.kind === "recv" && now.dtype ? "not written yet" : "";
  return [
    rank.call ? h("div", { class: "dk-call" }, h("code", {}, rank.call), tensorOf(now)) : null,
    rank.reason ? h("p", { class: "dk-reason", title: rank.reason }, reason(rank, store)) : null,
    now ? strips(now, now.values?.slice(0, 1), scale, unwritten) : null,
    last ? h("div", { class: "dk-last" },
      h("div", { class: "dk-was" }, h("span", { title: "completed" }, "✓"), h("span", {}, call(last, store)),
        now?.dtype && tensor(now) === tensor(last) ? null : tensorOf(last)),
      strips(last, last.values, scale)) : null,
  ];
}

// The reason for a rank's state; with three or more cards, only the ranks that it waits for.
function reason({ reason: full, waits = [] }, store) {
  if (!waits.length || store.frame.lanes.length < 3) return full;
  return `waits for ${waits.map((rank) => store.name(rank)).join(", ")}`;
}

// Values before and after, on one scale for all tensors of this shape.
function strips(bar, values, scale, note = "") {
  const [first, then] = values ?? [];
  const same = then && JSON.stringify(first?.values) === JSON.stringify(then.values); // a send does not change its tensor
  const shown = [["before", same ? null : first], [same ? "values" : "after", then]]
    .filter(([, s]) => s?.values.length);
  if (!shown.length) return note ? h("div", { class: "dk-note" }, note) : null;
  return h("div", { class: "dk-heat" }, shown.map(([when, summary]) => [
    strip(summary, scale[bar.shape]), h("span", {}, when),
    h("span", { class: "dk-caption" }, range(summary))]));
}

function range({ values, size, min, max }) {
  return size <= 4 ? `[${values.map(figure).join(", ")}]` : `${figure(min)} to ${figure(max)}`;
}

// The largest magnitude in the tensors of each shape.
function scales(ranks, store) {
  const scale = {};
  for (const id of ranks.flatMap(({ now, last }) => [now, last])) {
    const { shape, values = [] } = store.find(id) ?? {};
    const maxMagnitude = largest(values.flatMap((s) => s?.values ?? []));
    scale[shape] = Math.max(scale[shape] ?? 0, maxMagnitude);
  }
  return scale;
}
