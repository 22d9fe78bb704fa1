// The card of a cluster: what it is, how far it has come, and its processes in a table.

import { h } from "./dom.js";

export class Status {
  constructor(model, el) {
    this.model = model;
    this.root = h("figure", { class: "distkit-status" });
    el.append(this.root);
    this.changed = () => this.#draw();
    model.on("change:picture", this.changed);
    this.#draw();
  }

  #draw() {
    const { what, stage, note, columns, rows } = this.model.get("picture");
    const row = (cells, tag) => h("tr", {}, cells.map((cell) => h(tag, {}, String(cell))));
    this.root.replaceChildren(
      h("p", {}, h("strong", {}, what, " · ", h("span", { class: "dk-status" }, stage)),
        ` · ${note}`),
      h("table", {}, row(columns, "th"), rows.map((cells) => row(cells, "td"))));
  }

  dispose() {
    this.model.off("change:picture", this.changed);
    this.root.remove();
  }
}
