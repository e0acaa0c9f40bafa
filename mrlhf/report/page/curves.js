"use strict";
// All metrics as curves, in groups by the first part of their names.

const GROUPS = {
  val: "Validation, greedy",
  val_sampled: "Validation, sampled",
  test: "Test, greedy",
  test_sampled: "Test, sampled",
  reward: "Reward terms",
  critic: "Scores, advantages and critic",
  actor: "Actor",
  response_length: "Response length",
  training: "Progress, and engine against trainer",
  rollout_corr: "Rollout correction",
  se: "Standard errors of held-out results",
  timing_s: "Seconds of each phase",
  perf: "Speed and memory",
};

const listing = { text: "" };

function curves() {
  const groups = element("div");
  const fill = () => {
    clearCharts();
    groups.replaceChildren(...curveGroups());
  };
  fill();
  return [curveControls(fill), groups];
}

function curveControls(fill) {
  const search = element("input", {
    type: "search",
    value: listing.text,
    placeholder: "part of a name",
    oninput: debounced(() => {
      listing.text = search.value.trim().toLowerCase();
      fill();
    }, 120),
  });
  const amount = element("span", {}, ` ${drawing.smoothing}`);
  const smoothing = element("input", {
    type: "range",
    min: "0",
    max: "0.98",
    step: "0.02",
    value: String(drawing.smoothing),
    oninput: () => {
      drawing.smoothing = Number(smoothing.value);
      amount.textContent = ` ${drawing.smoothing}`;
      requestAnimationFrame(redrawCharts);
    },
  });

  const controls = [
    labelled("Metrics", search),
    element("label", {}, element("span", {}, "Smoothing", amount), smoothing),
    element("button", { type: "button", onclick: () => zoomTo(null) }, "Show all steps"),
  ];
  const keys = element("span", { class: "keys" });
  if (report.runs.length > 1) {
    const fillKeys = () => keys.replaceChildren(...runKeys(redrawCharts));
    fillKeys();
    const rename = (key) => {
      naming.key = key;
      fillKeys();
      redrawCharts();
    };
    const titles = ["directory", ...report.differing];
    controls.push(labelled("Tell runs apart by", choice(["", ...report.differing], naming.key, rename, titles)), keys);
  }
  const hint = element("p", { class: "faint" }, "Drag across a curve to zoom, double-click to see all steps. With the keyboard: arrows read values, + and - zoom, 0 shows all.");
  return element("section", {}, element("div", { class: "controls" }, ...controls), hint);
}

function curveGroups() {
  const groups = new Map();
  for (const name of metricNames()) {
    if (!name.toLowerCase().includes(listing.text)) continue;
    const first = name.split("/")[0];
    if (!groups.has(first)) groups.set(first, []);
    groups.get(first).push(name);
  }
  if (!groups.size) return [element("p", {}, "No metric has this in its name.")];

  const order = Object.keys(GROUPS);
  const place = (first) => (order.includes(first) ? order.indexOf(first) : order.length);
  const firsts = [...groups.keys()].sort((a, b) => place(a) - place(b));
  return firsts.map((first, number) => curveGroup(first, groups.get(first), number < 4 || listing.text));
}

// Metrics with the same values in every run share a chart, so that a group does not open with copies.
function withoutCopies(names) {
  const byContent = new Map();
  for (const name of names) {
    const content = JSON.stringify(report.runs.map((run) => run.metrics[name]));
    byContent.set(content, [...(byContent.get(content) ?? []), name]);
  }
  return [...byContent.values()];
}

function curveGroup(first, names, open) {
  const grid = element("div", { class: "grid curves" });
  const title = GROUPS[first] || first;
  const details = element("details", { open: Boolean(open) }, element("summary", {}, `${title} (${names.length})`), grid);
  const fill = () => {
    if (details.open && !grid.children.length) {
      grid.append(...withoutCopies(names).map((alike) => lineChart(alike.join(" = "), alike[0], report.runs).figure));
    }
  };
  fill();
  details.addEventListener("toggle", fill);
  return details;
}
