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

// Light or dark: as the system has it, until the button says otherwise; the browser remembers that.
const THEME = "mrlhf-theme";

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  redrawCharts();
}

function turnTheme() {
  const now = document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  const next = now === "dark" ? "light" : "dark";
  setTheme(next);
  try {
    localStorage.setItem(THEME, next);
  } catch {
    // A browser may keep nothing for a file.
  }
}

let remembered = null;
try {
  remembered = localStorage.getItem(THEME);
} catch {
  // As above.
}
if (remembered) setTheme(remembered);

// Keys that work anywhere but in a field.
const KEYS = [
  ["1 to 4", "the views"],
  ["← →", "values of a chart, tokens of a sample, phases of a rank: focus it first with Tab"],
  ["+ − 0", "zoom a chart; all steps"],
  ["d", "dark or light"],
  ["?", "this list; Escape closes it"],
];
const help = element("dialog", { "aria-label": "Keys" }, element("h2", {}, "Keys"), table(["key", "what it does"], KEYS.map(([key, does]) => [element("code", {}, key), does])), element("form", { method: "dialog" }, element("button", {}, "Close")));
document.body.append(help);

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  const names = Object.keys(VIEWS);
  if (event.key === "?") help.open ? help.close() : help.showModal();
  else if (event.key === "d") turnTheme();
  else if (names[Number(event.key) - 1]) open(names[Number(event.key) - 1]);
});

document.getElementById("buttons").append(
  element("button", { type: "button", onclick: turnTheme, "aria-label": "Dark or light" }, "◐"),
  " ",
  element("button", { type: "button", onclick: () => help.showModal(), "aria-label": "Keys" }, "?"),
);

const asked = () => (location.hash.slice(1) in VIEWS ? location.hash.slice(1) : "overview");
window.addEventListener("hashchange", () => open(asked()));
open(asked());
