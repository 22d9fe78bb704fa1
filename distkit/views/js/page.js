// The tabs of a stand-alone page. A view is unpacked and drawn when it is first shown.

import { renders } from "./render.js";

const { known, pictures } = JSON.parse(document.getElementById("pictures").textContent);
const nothing = () => {};

async function inflated(letters) {
  const bytes = Uint8Array.from(atob(letters), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

async function unpacked({ json, bytes }) {
  const picture = JSON.parse(new TextDecoder().decode(await inflated(json)));
  if (bytes) picture.columns.bytes = new DataView(await inflated(bytes));
  return picture;
}

async function draw(el) {
  el.dataset.begun = "";
  const { view, picture: number } = el.dataset;
  const [module, picture] = await Promise.all([import(`distkit/${view.toLowerCase()}.js`), unpacked(pictures[number])]);
  const model = { get: (key) => (key === "picture" ? picture : undefined), on: nothing, off: nothing };
  renders(module[view], known)({ model, el });
}

const panelOf = (tab) => document.getElementById(tab.getAttribute("aria-controls"));

function show() {
  for (const el of document.querySelectorAll("[data-view]:not([data-begun])")) {
    if (!el.closest("[hidden]")) draw(el);
  }
}

function select(tabs, chosen) {
  for (const tab of tabs) {
    tab.setAttribute("aria-selected", String(tab === chosen));
    tab.tabIndex = tab === chosen ? 0 : -1;
    panelOf(tab).hidden = tab !== chosen;
  }
  show();
}

for (const list of document.querySelectorAll("[role=tablist]")) {
  const tabs = [...list.children];
  list.addEventListener("click", (e) => tabs.includes(e.target) && select(tabs, e.target));
  list.addEventListener("keydown", (e) => {
    const [at, last] = [tabs.indexOf(e.target), tabs.length - 1];
    const to = { ArrowRight: at === last ? 0 : at + 1, ArrowLeft: at ? at - 1 : last, Home: 0, End: last }[e.key];
    if (to === undefined) return;
    e.preventDefault();
    select(tabs, tabs[to]);
    tabs[to].focus();
  });
}
show();
