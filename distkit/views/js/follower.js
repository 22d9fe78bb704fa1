// A view that follows its model and the page, and draws at most once per frame.

// Attributes of the body that change with a front end's theme. They are observed because hidden views
// have no transitions.
const THEME_ATTRIBUTES = ["class", "style", "data-jp-theme-light", "data-jp-theme-name",
  "data-vscode-theme-kind"];

// Keys that a view handles while the pointer is over it, unless they are for another control.
const HOVER_KEYS = [" ", "ArrowLeft", "ArrowRight"];
const CONTROLS = "input, textarea, select, button, [contenteditable=true]";

// A subclass has update(value), a root on the page and, if it draws once per frame, frame().
export class Follower {
  // name: the trait of the model to follow.
  constructor(model, name = "picture") {
    Object.assign(this, { model, name, stop: new AbortController() });
    this.changed = () => {
      this.update(model.get(name));
      this.scheduleFrame();
    };
    model.on(`change:${name}`, this.changed);
  }

  on(target, type, act, options) {
    target.addEventListener(type, act, { signal: this.stop.signal, ...options });
  }

  // Calls act(e) for keys. A button that is clicked passes the focus to the view, so that the space
  // bar does not press it again.
  onKeys(act) {
    this.on(this.root, "keydown", act);
    this.on(window, "keydown", (e) => {
      const other = this.root.contains(e.target) || e.target.closest(CONTROLS);
      if (HOVER_KEYS.includes(e.key) && !other && this.root.matches(":hover")) act(e);
    }, { capture: true });
    this.on(this.root, "click", (e) => {
      if (e.detail && e.target.closest("button")) this.root.focus({ preventScroll: true });
    });
  }

  // Redraws when the page's colors change, or the observed element is resized.
  watch(observed = this.root) {
    const redraw = () => this.scheduleFrame();
    for (const type of ["transitionrun", "transitionend", "transitioncancel"])
      this.on(this.root, type, (e) => { if (e.target === this.root) redraw(); });
    this.on(matchMedia("(prefers-color-scheme: dark)"), "change", redraw);
    const [themeObserver, resizeObserver] = [new MutationObserver(redraw), new ResizeObserver(redraw)];
    themeObserver.observe(document.body, { attributes: true, attributeFilter: THEME_ATTRIBUTES });
    resizeObserver.observe(observed);
    this.stop.signal.addEventListener("abort", () => {
      themeObserver.disconnect();
      resizeObserver.disconnect();
    });
  }

  scheduleFrame() {
    if (this.disposed) return;
    this.pending ??= requestAnimationFrame(() => {
      this.pending = null;
      if (!this.disposed) this.frame();
    });
  }

  frame() {}

  dispose() {
    this.disposed = true;
    this.stop.abort();
    this.model.off(`change:${this.name}`, this.changed);
    this.root.remove();
  }
}
