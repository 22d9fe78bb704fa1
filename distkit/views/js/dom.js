// Helpers for HTML. Labels are user input, so text is never inserted as markup.

// Properties that are functions, such as onclick, become event listeners.
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (key === "style") element.style.cssText = value;
    else if (typeof value === "function") element.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined) element.setAttribute(key, value);
  }
  element.append(...children.flat(Infinity).filter((child) => (child ?? "") !== ""));
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

export function s(tag, props = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(props)) {
    if (value !== null) element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

export const reducedMotion = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

export const muted = (...children) => h("span", { class: "dkv-muted" }, children);
export const dot = (color) => h("span", { class: "dk-dot", style: `background:${color}` });

export const button = (label, sign, onclick) =>
  h("button", { type: "button", "aria-label": label, title: label, onclick }, sign);

export const icon = (name) => h("i", { class: `dk-icon dk-icon-${name}`, "aria-hidden": "true" });

// Creates toggle buttons, keyed by name; each element of "all" is [name, key, label, title].
export function toggles(all, onclick) {
  return Object.fromEntries(all.map(([name, key, label, title]) => {
    const attributes = { type: "button", title: `${title} (${key})`, onclick: () => onclick(name) };
    return [name, h("button", attributes, label)];
  }));
}

export function press(buttons, pressed) {
  for (const [name, button] of Object.entries(buttons))
    button.setAttribute("aria-pressed", String(pressed(name)));
}

export const speedSelect = (speeds, unit) => h("select", { class: "dk-speed", "aria-label": "speed" },
  speeds.map((speed) => h("option", { value: speed, selected: speed === 1 ? "" : null },
    `${speed} ${unit}`)));

export const liveRegion = () => h("p", { class: "dk-spoken", "aria-live": "polite" });

export const modified = (e) => e.ctrlKey || e.metaKey || e.altKey;

// Runs the action of a key, and keeps JupyterLab from handling the key.
export function handleKey(e, act) {
  if (!act || modified(e)) return;
  e.preventDefault();
  e.stopPropagation();
  act();
}
