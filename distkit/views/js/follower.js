// A view that follows its model and the page: it takes in what there is, and draws once a frame at
// most.

// Front ends change attributes of the body; a transition tells only what is on the screen.
const SIGNS = ["class", "style", "data-jp-theme-light", "data-jp-theme-name",
  "data-vscode-theme-kind"];

// A subclass has take(value), frame(), and a root on the page.
export class Follower {
  // name: of what it follows on the model.
  constructor(model, name = "picture") {
    Object.assign(this, { model, name, stop: new AbortController() });
    this.changed = () => {
      this.take(model.get(name));
      this.later();
    };
    model.on(`change:${name}`, this.changed);
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
    this.model.off(`change:${this.name}`, this.changed);
    this.root.remove();
  }
}
