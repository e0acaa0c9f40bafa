"use strict";
// Builds elements and writes numbers. Text goes into the page as text nodes alone, so that what a
// model has written is never read as HTML.

function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(key.slice(2), value);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

// A number with four digits; a dash where there is none.
function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

function swatch(color) {
  const node = element("span", { class: "swatch" });
  node.style.background = color;
  return node;
}

// A labelled control; `inline` puts the label behind it.
function labelled(text, control, inline = false) {
  const children = inline ? [control, text] : [text, control];
  return element("label", { class: inline ? "inline" : null }, ...children);
}

function choice(values, chosen, onchange, titles = values) {
  const options = values.map((value, number) =>
    element("option", { value, selected: String(value) === String(chosen) }, String(titles[number])),
  );
  return element("select", { onchange: (event) => onchange(event.target.value) }, ...options);
}

function table(titles, rows) {
  const head = element("tr", {}, ...titles.map((title) => element("th", { scope: "col" }, title)));
  const lines = rows.map((cells) =>
    element("tr", {}, ...cells.map((cell) => (cell instanceof Node ? element("td", {}, cell) : dataCell(cell)))),
  );
  return element(
    "div",
    { class: "scroll" },
    element("table", {}, element("thead", {}, head), element("tbody", {}, ...lines)),
  );
}

function dataCell(value) {
  if (typeof value === "number" || value === null) return element("td", { class: "number" }, short(value));
  return element("td", { class: "long" }, String(value));
}

// Calls `act` once things have been quiet for `wait` milliseconds.
function debounced(act, wait) {
  let timer = 0;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(act, wait);
  };
}

function quantile(sorted, share) {
  if (!sorted.length) return null;
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
}
