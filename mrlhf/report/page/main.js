"use strict";
// The views of the report, and the tabs that lead to them.

const VIEWS = {
  overview: ["Overview", overview],
  curves: ["Curves", curves],
  rollouts: ["Rollouts", inspector],
  timeline: ["Timeline", timeline],
};

const tabs = document.getElementById("tabs");
const view = document.getElementById("view");
let shown = "";

function show(name) {
  shown = name;
  clearCharts();
  views = [];
  view.replaceChildren(...VIEWS[name][1]());
  view.setAttribute("aria-label", VIEWS[name][0]);
  for (const tab of tabs.children) {
    const selected = tab.dataset.view === name;
    tab.setAttribute("aria-selected", String(selected));
    tab.tabIndex = selected ? 0 : -1;
  }
}

function open(name) {
  if (name !== shown) show(name);
  if (location.hash !== `#${name}`) history.replaceState(null, "", `#${name}`);
}

function turnTab(event) {
  const names = Object.keys(VIEWS);
  const at = names.indexOf(shown);
  const moves = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: names.length - 1 };
  if (!(event.key in moves)) return;
  const next = names[(moves[event.key] + names.length) % names.length];
  open(next);
  tabs.querySelector(`[data-view="${next}"]`).focus();
  event.preventDefault();
}

for (const [name, [title]] of Object.entries(VIEWS)) {
  const attributes = { role: "tab", type: "button", "data-view": name, "aria-controls": "view", onclick: () => open(name) };
  tabs.append(element("button", attributes, title));
}
tabs.addEventListener("keydown", turnTab);

const asked = () => (location.hash.slice(1) in VIEWS ? location.hash.slice(1) : "overview");
window.addEventListener("hashchange", () => open(asked()));
open(asked());
