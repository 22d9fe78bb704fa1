// Tells a view when the page's colours change, wherever the view is: a transition tells only what
// is on the screen. Front ends change attributes of the body; the system may prefer another scheme.

const SIGNS = ["class", "style", "data-jp-theme-light", "data-jp-theme-name", "data-vscode-theme-kind"];

export function onTheme(act, signal) {
  const observer = new MutationObserver(act);
  observer.observe(document.body, { attributes: true, attributeFilter: SIGNS });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", act, { signal });
  signal.addEventListener("abort", () => observer.disconnect());
}
