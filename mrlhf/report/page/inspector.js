"use strict";
// The rollouts: a list that filters narrow, the samples that were chosen from it, and how rewards and
// lengths are distributed.

const MOST_ROWS = 100;
const inspecting = { run: 0, step: "", finish: "", text: "", order: "newest", filters: {}, opened: [] };

const ORDERS = {
  newest: ["newest step", (s) => (a, b) => s.step[b] - s.step[a] || a - b],
  step: ["by step", (s) => (a, b) => a - b],
  best: ["highest reward", (s) => (a, b) => s.score[b] - s.score[a] || a - b],
  worst: ["lowest reward", (s) => (a, b) => s.score[a] - s.score[b] || a - b],
  longest: ["longest", (s) => (a, b) => s.length[b] - s.length[a] || a - b],
  turns: ["most turns", (s) => (a, b) => s.turns[b] - s.turns[a] || a - b],
  errors: ["most errors of tools", (s) => (a, b) => s.errors[b] - s.errors[a] || a - b],
  shortest: ["shortest", (s) => (a, b) => s.length[a] - s.length[b] || a - b],
};

const MAIN_COLUMNS = new Set(["step", "prompt", "reward", "response"]); // a phone has these alone
const OF_TURNS = new Set(["turns", "errors"]);

function hasTurns(run) {
  return run.samples.turns.some((turns) => turns !== null);
}

function inspector() {
  const withSamples = report.runs.filter((run) => run.count);
  if (!withSamples.length) {
    const words = "No rollouts were written down. Set rollout.dump_freq, and keep rollout.dump_format at parquet.";
    return [element("p", {}, words)];
  }
  if (!report.runs[inspecting.run].count) inspecting.run = withSamples[0].number;
  const run = report.runs[inspecting.run];

  const list = element("div");
  const opened = element("div", { class: "samples", id: "samples" });
  const refill = () => fillList(run, list, opened);
  refill();
  unpackTexts(run).then(refill);
  showOpened(run, opened);

  const shapes = element(
    "div",
    { class: "grid wide" },
    histogram("Rewards of the samples at each step", run, "score"),
    histogram("Lengths of the samples at each step, tokens", run, "length"),
  );
  const left = run.leftOut ? [element("p", { class: "faint" }, `${run.leftOut} more samples were written down than this report has room for.`)] : [];
  return [filterControls(run, withSamples, refill, opened), ...left, list, coloringControls(run), opened, element("h2", {}, "Over the steps"), shapes];
}

function filterControls(run, withSamples, refill, opened) {
  const steps = [...new Set(run.samples.step)].sort((a, b) => a - b);
  const set = (name) => (value) => {
    inspecting[name] = value;
    refill();
  };
  const stepChoice = choice(["", ...steps], inspecting.step, set("step"), ["all", ...steps]);
  stepChoice.id = "step-filter";
  const turn = (by) => () => {
    const at = steps.indexOf(Number(inspecting.step));
    const next = inspecting.step === "" ? (by > 0 ? 0 : steps.length - 1) : at + by;
    if (next < 0 || next >= steps.length) return;
    stepChoice.value = String(steps[next]);
    set("step")(stepChoice.value);
  };
  const bound = (name, title) => {
    const input = element("input", { type: "number", step: "any", value: inspecting.filters[name] ?? "", id: name });
    input.addEventListener("input", () => {
      if (input.value === "") delete inspecting.filters[name];
      else inspecting.filters[name] = Number(input.value);
      refill();
    });
    return labelled(title, input);
  };
  const search = element("input", { type: "search", value: inspecting.text, id: "text-filter" });
  search.addEventListener("input", debounced(() => set("text")(search.value.toLowerCase()), 120));

  const controls = [];
  if (withSamples.length > 1) {
    const pick = (number) => {
      Object.assign(inspecting, { run: Number(number), step: "", opened: [] });
      show("rollouts");
    };
    controls.push(labelled("Run", choice(withSamples.map((r) => r.number), run.number, pick, withSamples.map(label))));
  }
  const arrows = element(
    "span",
    {},
    element("button", { type: "button", "aria-label": "Step before", onclick: turn(-1) }, "◀"),
    " ",
    element("button", { type: "button", "aria-label": "Next step", onclick: turn(1) }, "▶"),
  );
  controls.push(labelled("Step", stepChoice), arrows);
  controls.push(bound("minScore", "Reward from"), bound("maxScore", "to"));
  controls.push(bound("minLength", "Length from"), bound("maxLength", "to"));
  controls.push(labelled("End", choice(["", "stop", "length", "failure"], inspecting.finish, set("finish"), ["any", "by itself", "cut off", "failed"])));
  controls.push(labelled("Text of prompt or response", search));
  const names = Object.keys(ORDERS).filter((name) => hasTurns(run) || !OF_TURNS.has(name));
  if (!names.includes(inspecting.order)) inspecting.order = "newest";
  controls.push(labelled("Order", choice(names, inspecting.order, set("order"), names.map((name) => ORDERS[name][0]))));
  return element("div", { class: "controls", role: "search" }, ...controls);
}

function matching(run) {
  const { step, score, length, finish_reason: finish } = run.samples;
  const { minScore = -Infinity, maxScore = Infinity, minLength = 0, maxLength = Infinity } = inspecting.filters;
  const wanted = inspecting.step === "" ? null : Number(inspecting.step);
  const found = [];
  for (let i = 0; i < run.count; i++) {
    if (wanted !== null && step[i] !== wanted) continue;
    if (score[i] < minScore || score[i] > maxScore) continue;
    if (length[i] < minLength || length[i] > maxLength) continue;
    if (inspecting.finish && finish[i] !== inspecting.finish) continue;
    if (inspecting.text && !(run.texts[i] && run.texts[i][2].includes(inspecting.text))) continue;
    found.push(i);
  }
  return found.sort(ORDERS[inspecting.order][1](run.samples));
}

function fillList(run, list, opened) {
  const found = matching(run);
  const rows = found.slice(0, MOST_ROWS).map((i) => listRow(run, i, opened));
  const titles = ["step", "prompt", "sample", "reward", "length", ...(hasTurns(run) ? ["turns", "errors"] : []), "end", "response"];
  const head = element("tr", {}, ...titles.map((title) => element("th", { scope: "col", class: MAIN_COLUMNS.has(title) ? null : "minor" }, title)));
  const body = element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows));

  const more = found.length > MOST_ROWS ? `; the first ${MOST_ROWS} are listed` : "";
  const unread = run.texts.length < run.count ? " Texts are still being unpacked." : "";
  const words = `${found.length} of ${run.count} samples${more}. Choose one or two to compare.${unread}`;
  const count = element("p", { class: "faint", id: "count", role: "status" }, words);
  list.replaceChildren(count, element("div", { class: "rows", tabindex: "-1" }, body));
}

function listRow(run, i, opened) {
  const s = run.samples;
  const choose = () => {
    inspecting.opened = [i, ...inspecting.opened.filter((other) => other !== i)].slice(0, 2);
    showOpened(run, opened);
    mark();
  };
  const name = `Open sample ${s.sample[i]} of prompt ${s.uid[i]} at step ${s.step[i]}`;
  const button = element("button", { type: "button", onclick: choose, "aria-label": name }, String(s.step[i]));
  const [prompt, response] = run.texts[i] ?? ["…", "…"];
  const row = element("tr", { "data-sample": String(i), "aria-selected": String(inspecting.opened.includes(i)) }, element("td", {}, button));
  const mark = () => {
    for (const other of row.parentNode.children) {
      other.setAttribute("aria-selected", String(inspecting.opened.includes(Number(other.dataset.sample))));
    }
  };
  const minor = (cell) => {
    cell.classList.add("minor");
    return cell;
  };
  const asked = dataCell(prompt.slice(0, 80));
  asked.classList.add("asked");
  row.append(asked, minor(dataCell(s.sample[i])), dataCell(s.score[i]), minor(dataCell(s.length[i])));
  if (hasTurns(run)) row.append(minor(dataCell(s.turns[i])), minor(dataCell(s.errors[i])));
  row.append(minor(element("td", {}, s.finish_reason[i])), dataCell(response.slice(0, 160)));
  return row;
}

function coloringControls(run) {
  if (!run.quantities.includes(coloring.quantity)) coloring.quantity = run.quantities[0];
  const paint = (quantity) => {
    coloring.quantity = quantity;
    for (const view of views) view.paint();
  };
  const select = choice(run.quantities, coloring.quantity, paint);
  select.id = "coloring";
  return element("div", { class: "controls" }, labelled("Colour tokens by", select));
}

let views = []; // the samples that are open
let opening = 0;

async function showOpened(run, opened) {
  const turn = ++opening;
  const samples = await Promise.all(inspecting.opened.map((i) => openSample(run, i)));
  if (turn !== opening) return; // another sample has been chosen meanwhile
  views = samples.map((sample, place) => {
    const index = inspecting.opened[place];
    return new SampleView(run, index, sample, samePromptControls(run, index, place, opened));
  });
  opened.replaceChildren(...views.map((view) => view.node));
}

// Chooses another response to the same prompt, at this step or another one.
function samePromptControls(run, index, place, opened) {
  const s = run.samples;
  const others = samePrompt(run, index);
  const put = (next, where) => {
    inspecting.opened[where] = next;
    showOpened(run, opened);
  };
  const titles = others.map((i) => `step ${s.step[i]}, sample ${s.sample[i]}, reward ${short(s.score[i])}`);
  const select = choice(others, index, (value) => put(Number(value), place), titles);
  const parts = [labelled(`Responses to this prompt (${others.length})`, select)];

  const elsewhere = others.find((i) => s.step[i] !== s.step[index] && !inspecting.opened.includes(i));
  if (place === 0 && elsewhere !== undefined) {
    const beside = () => put(elsewhere, 1);
    parts.push(element("button", { type: "button", class: "beside", onclick: beside }, "Beside another step"));
  }
  return element("div", { class: "controls" }, ...parts);
}
