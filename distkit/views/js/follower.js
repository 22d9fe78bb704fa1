// A view that follows its model and the page: it takes in patches, and draws once a frame at most.

// Front ends change attributes of the body; a transition tells only what is on the screen.
const SIGNS = ["class", "style", "data-jp-theme-light", "data-jp-theme-name",
  "data-vscode-theme-kind"];

// A subclass has merge(patch), frame(), and a root on the page.
export class Follower {
  // kind: of the patches, "patch" or "step"; next: the number of the first one.
  constructor(model, next, kind = "patch") {
    Object.assign(this, { model, next, kind, stop: new AbortController() });
    this.changed = () => this.drain();
    model.on("change", this.changed);
  }

  on(target, type, act, options) {
    target.addEventListener(type, act, { signal: this.stop.signal, ...options });
  }

  // Draws anew when the page's colours change, or the size of what is sized.
  watch(sized = this.root) {
    const again = () => this.later();
    for (const type of ["transitionrun", "transitionend", "transitioncancel"])
      this.on(this.root, type, (e) => { if (e.target === this.root) again(); });
    this.on(matchMedia("(prefers-color-scheme: dark)"), "change", again);
    const [theme, resized] = [new MutationObserver(again), new ResizeObserver(again)];
    theme.observe(document.body, { attributes: true, attributeFilter: SIGNS });
    resized.observe(sized);
    this.stop.signal.addEventListener("abort", () => {
      theme.disconnect();
      resized.disconnect();
    });
  }

  // Patches lie on the model under a number each, so that none is lost before we look.
  drain() {
    const first = this.next;
    let patch;
    while ((patch = this.model.get(`${this.kind}${this.next}`))) {
      this.merge(patch);
      this.next += 1;
    }
    if (this.next > first) this.later();
    return this.next > first;
  }

  later() {
    if (this.gone) return;
    this.pending ??= requestAnimationFrame(() => {
      this.pending = null;
      if (!this.gone) this.frame();
    });
  }

  dispose() {
    this.gone = true;
    this.stop.abort();
    this.model.off("change", this.changed);
    this.root.remove();
  }
}
