"use strict";
// Where the time goes: the phases of all steps stacked, and one step with a lane for each rank.

const PHASE_COLORS = ["#2f7ed8", "#e4572e", "#2a9d5b", "#9b5de5", "#c78c06", "#0fa3b1", "#d6336c", "#6f9d17", "#8d6e4f", "#7a8288", "#5e60ce", "#b5179e"];
const WHOLE = new Set(["step"]); // phases that hold the others
const watching = { run: 0, step: null };

function timeline() {
  const run = report.runs[watching.run];
  const parts = [];
  if (report.runs.length > 1) {
    const pick = (number) => {
      Object.assign(watching, { run: Number(number), step: null });
      show("timeline");
    };
    const names = report.runs.map(label);
    const numbers = report.runs.map((other) => other.number);
    parts.push(element("div", { class: "controls" }, labelled("Run", choice(numbers, run.number, pick, names))));
  }

  const phases = phaseNames(run);
  const keys = phases.map((phase, i) => element("span", {}, swatch(phaseColor(i)), phaseName(phase)));
  const lanes = element("section", { "aria-label": "Lanes" });
  parts.push(element("h2", {}, "Seconds of each step, by phase"));
  parts.push(stackedChart(run, phases), element("div", { class: "keys" }, ...keys));
  parts.push(element("h2", {}, "One step, rank by rank"), lanes);
  parts.push(...memoryTables(run));
  showLanes(run, phases, lanes);
  return parts;
}

function phaseColor(i) {
  return PHASE_COLORS[i % PHASE_COLORS.length];
}

function phaseNames(run) {
  const names = Object.keys(run.metrics).filter((name) => name.startsWith("timing_s/"));
  const inner = names.map((name) => name.slice(9)).filter((name) => !WHOLE.has(name));
  return inner.length ? inner : names.map((name) => name.slice(9));
}

function stackedChart(run, phases) {
  const columns = phases.map((phase) => run.metrics[`timing_s/${phase}`]);
  const make = () => {
    let sums = run.steps.map(() => 0);
    const stacked = columns.map((column) => {
      sums = sums.map((sum, i) => sum + (column[i] || 0));
      return sums;
    });
    // The highest sum is drawn first, and the lower ones over it.
    // A bar stands before its step's end, so the last one is whole.
    const data = [run.steps];
    const series = [];
    for (let i = phases.length - 1; i >= 0; i--) {
      data.push(stacked[i]);
      const paths = uPlot.paths.stepped({ align: -1 });
      series.push({ stroke: phaseColor(i), fill: phaseColor(i), width: 0.5, paths, points: { show: false } });
    }
    return { data, series, scales: { y: { range: (_, low, high) => [0, high || 1] } } };
  };
  const read = (index) => {
    const words = phases.map((phase, i) => [phase, columns[i][index]]).filter(([, seconds]) => seconds);
    words.sort((a, b) => b[1] - a[1]);
    return `step ${run.steps[index]}: ${words.map(([phase, seconds]) => `${phaseName(phase)} ${short(seconds)} s`).join(", ")}`;
  };
  return new Chart("Seconds of each phase", make, read, 260).figure;
}

async function showLanes(run, phases, lanes) {
  const byStep = await phasesOf(run);
  const steps = Object.keys(byStep).map(Number).sort((a, b) => a - b);
  if (!steps.length) {
    lanes.replaceChildren(element("p", {}, "No rank has written down its phases; see trainer.timeline_freq."));
    return;
  }

  if (!steps.includes(watching.step)) watching.step = steps[Math.floor(steps.length / 2)];
  const drawn = element("div");
  const number = element("span", {}, ` ${watching.step}`);
  const draw = () => drawn.replaceChildren(...lanesOf(byStep[watching.step], phases));
  const slider = element("input", {
    type: "range",
    id: "lane-step",
    min: "0",
    max: String(steps.length - 1),
    value: String(steps.indexOf(watching.step)),
    oninput: () => {
      watching.step = steps[Number(slider.value)];
      number.textContent = ` ${watching.step}`;
      draw();
    },
  });
  draw();
  const words = "The strong part of a span is the share of it in which the rank's processor computed; the pale part is waiting, for other ranks or for a GPU.";
  const controls = element("div", { class: "controls" }, element("label", {}, element("span", {}, "Step", number), slider));
  lanes.replaceChildren(controls, element("p", { class: "faint" }, words), drawn);
}

function lanesOf(byRank, phases) {
  const ranks = Object.keys(byRank).map(Number).sort((a, b) => a - b);
  const inner = (spans) => spans.filter(([phase]) => phases.includes(phase));
  const end = Math.max(...ranks.flatMap((rank) => byRank[rank].map(([, begin, seconds]) => begin + seconds)));
  const reading = element("output", { role: "status" }, "Point at a span, or focus a lane and use the arrow keys.");

  const lanes = ranks.map((rank) => lane(rank, inner(byRank[rank]), phases, end, reading));
  const axis = element("div", { class: "lane faint" }, element("span", {}, "seconds"), element("span", {}, `0 to ${short(end)}`));
  return [element("div", { class: "lanes" }, ...lanes, axis), element("p", {}, reading), spreadTable(byRank, ranks, phases)];
}

function lane(rank, spans, phases, end, reading) {
  let at = -1;
  const tell = (i) => {
    at = i;
    const [phase, begin, seconds, busy] = spans[i];
    reading.textContent = `rank ${rank}, ${phaseName(phase)}: from ${short(begin)} s for ${short(seconds)} s, ${short(busy)} s of processor time`;
  };
  const bars = spans.map(([phase, begin, seconds, busy], i) => {
    const color = phaseColor(phases.indexOf(phase));
    const filled = element("span", { class: "busy" });
    filled.style.height = `${100 * Math.min(1, seconds > 0 ? busy / seconds : 0)}%`;
    filled.style.background = color;
    const bar = element("span", { class: "span", onmouseover: () => tell(i) }, filled);
    bar.style.left = `${(100 * begin) / end}%`;
    bar.style.width = `${(100 * seconds) / end}%`;
    bar.style.background = `${color}55`;
    return bar;
  });
  const move = (event) => {
    if (!["ArrowLeft", "ArrowRight"].includes(event.key) || !spans.length) return;
    tell(Math.min(spans.length - 1, Math.max(0, at + (event.key === "ArrowRight" ? 1 : -1))));
    event.preventDefault();
  };
  const track = element("div", { class: "track", tabindex: "0", role: "group", "aria-label": `Phases of rank ${rank}`, onkeydown: move }, ...bars);
  return element("div", { class: "lane" }, element("span", {}, `rank ${rank}`), track);
}

// What models and engine hold on the device of rank 0, in the last step.
function memoryTables(run) {
  const last = run.steps.length - 1;
  const rows = (prefix) => {
    const names = Object.keys(run.metrics).filter((name) => name.startsWith(prefix) && run.metrics[name][last] !== null);
    const held = names.map((name) => [phaseName(name.slice(prefix.length)), run.metrics[name][last]]);
    return held.sort((a, b) => b[1] - a[1]);
  };
  const phases = rows("perf/memory_in/");
  if (!phases.length) return [];
  const title = element("h2", {}, "Memory of models and engine in the last step, rank 0");
  const owners = table(["owner in the fullest phase", "10⁹ bytes"], rows("perf/memory/"));
  return [title, table(["phase", "10⁹ bytes, without activations"], phases), owners];
}

// How far the ranks are apart in each phase, and which one computed longest.
function spreadTable(byRank, ranks, phases) {
  const rows = [];
  for (const phase of phases) {
    const sums = ranks.map((rank) => {
      const own = byRank[rank].filter(([name]) => name === phase);
      return [rank, own.reduce((sum, span) => sum + span[2], 0), own.reduce((sum, span) => sum + span[3], 0)];
    });
    const seconds = sums.map(([, wall]) => wall);
    if (!Math.max(...seconds)) continue;
    const busiest = sums.reduce((a, b) => (b[2] > a[2] ? b : a));
    const mean = sums.reduce((sum, [, , busy]) => sum + busy, 0) / sums.length;
    rows.push([phaseName(phase), Math.min(...seconds), Math.max(...seconds), mean, `rank ${busiest[0]}: ${short(busiest[2])}`]);
  }
  return table(["phase", "shortest, s", "longest, s", "processor, mean s", "processor, most s"], rows);
}
