// A sheet view: heading, notices, and a body that is redrawn from the picture.

import { notices } from "./frame.js";
import { applyTheme, styleOf } from "./colors.js";
import { h, liveRegion } from "./dom.js";
import { Follower } from "./follower.js";

// A subclass has build(), load() and draw().
export class Sheet extends Follower {
  constructor(model, el, name, aria) {
    const picture = model.get("picture");
    super(model);
    Object.assign(this, { picture, theme: picture.theme });
    this.head = h("div", { class: "dk-head" });
    this.tools = h("div", { class: "dkv-values-tools" });
    this.notices = h("ul", { class: "dk-notices" });
    this.body = h("div", { class: "dkv-body" });
    this.liveRegion = liveRegion();
    this.scratch = h("canvas").getContext("2d");
    const kinds = `distkit-timeline distkit-values distkit-${name}`;
    this.root = h("figure", { class: kinds, "aria-label": aria },
      h("header", {}, this.head, this.tools), this.notices, this.body, this.liveRegion);
    el.append(this.root);
    this.build();
    this.watch();
    this.scheduleFrame();
  }

  update(picture) {
    this.picture = picture;
    this.load();
  }

  frame() {
    if (!this.root.clientWidth) return; // not on the page yet, or hidden
    this.style = styleOf(this.root, this.scratch, this.theme);
    applyTheme(this.root, this.style);
    const { title, facts, live } = this.picture;
    this.head.replaceChildren(h("strong", {}, title || this.constructor.name),
      h("span", { class: "dk-facts" }, facts.join(" · ")),
      live ? h("span", { class: "dk-live" }, "live") : "");
    this.notices.replaceChildren(...notices(this.picture));
    this.draw();
    this.root.dataset.drawn = String((Number(this.root.dataset.drawn) || 0) + 1);
  }

  color(lane) {
    return this.style.ranks[lane % this.style.ranks.length];
  }
}
