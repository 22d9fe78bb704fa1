// The tabs of a stand-alone page. A view is unpacked and drawn when it first becomes visible.

import { renders } from "./render.js";

const nothing = () => {};

async function inflate(encoded) {
  const bytes = Uint8Array.from(atob(encoded), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

async function unpack({ json, bytes }) {
  const picture = JSON.parse(new TextDecoder().decode(await inflate(json)));
  if (bytes) picture.columns.bytes = new DataView(await inflate(bytes));
  return picture;
}

const panelOf = (tab) => document.getElementById(tab.getAttribute("aria-controls"));

function select(tabs, chosen) {
  for (const tab of tabs) {
    tab.setAttribute("aria-selected", String(tab === chosen));
    tab.tabIndex = tab === chosen ? 0 : -1;
    panelOf(tab).hidden = tab !== chosen;
  }
}

// Opens the page; views maps names to view classes.
export function open(views) {
  const pictures = JSON.parse(document.getElementById("pictures").textContent);

  async function draw(el) {
    el.dataset.begun = "";
    const picture = await unpack(pictures[el.dataset.picture]);
    const get = (key) => (key === "picture" ? picture : undefined);
    renders(views[el.dataset.view])({ model: { get, on: nothing, off: nothing }, el });
  }

  function show() {
    for (const el of document.querySelectorAll("[data-view]:not([data-begun])")) {
      if (!el.closest("[hidden]")) draw(el);
    }
  }

  for (const list of document.querySelectorAll("[role=tablist]")) {
    const tabs = [...list.children];
    const choose = (tab) => {
      select(tabs, tab);
      show();
    };
    list.addEventListener("click", (e) => tabs.includes(e.target) && choose(e.target));
    list.addEventListener("keydown", (e) => {
      const [at, last] = [tabs.indexOf(e.target), tabs.length - 1];
      const next = at === last ? 0 : at + 1;
      const to = { ArrowRight: next, ArrowLeft: at ? at - 1 : last, Home: 0, End: last }[e.key];
      if (to === undefined) return;
      e.preventDefault();
      choose(tabs[to]);
      tabs[to].focus();
    });
  }
  show();
}
