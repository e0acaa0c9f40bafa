"use strict";
// Charts over training steps, drawn by uPlot. A chart is drawn when it comes into sight. All of them
// zoom together: drag across one, or focus it and use the keys.

const charts = new Set(); // of the present view
const drawing = { smoothing: 0, zoom: null };

const sight = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting && !target.chart.plot) target.chart.draw();
    }
  },
  { rootMargin: "150px" },
);

const sizes = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const { plot, height } = target.chart;
    const width = target.clientWidth;
    if (plot && width && width !== plot.width) plot.setSize({ width, height });
  }
});

function clearCharts() {
  for (const chart of charts) chart.remove();
  charts.clear();
}

function redrawCharts() {
  for (const chart of charts) chart.redraw();
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawCharts);

// On paper all charts are in sight.
window.addEventListener("beforeprint", () => {
  for (const chart of charts) if (!chart.plot && chart.holder.isConnected) chart.draw();
});

function zoomTo(range) {
  drawing.zoom = range;
  for (const chart of charts) chart.applyZoom();
}

function themeColor(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

class Chart {
  // `make` gives {data, series, plugins?, bands?, axes?} when the chart is drawn; `read` gives the
  // words for the position `index` of the data.
  constructor(title, make, read, height = 190) {
    this.make = make;
    this.read = read;
    this.height = height;
    this.plot = null;
    this.output = element("output", { "aria-live": "off" });
    this.holder = element("div");
    this.figure = element(
      "figure",
      {
        class: "chart",
        tabindex: "0",
        "aria-label": `${title}. Arrow keys read values, plus and minus zoom, 0 shows all steps.`,
        onkeydown: (event) => this.key(event),
      },
      element("figcaption", {}, title),
      this.holder,
      this.output,
    );
    this.holder.chart = this;
    this.holder.style.minHeight = `${height}px`;
    charts.add(this);
    sight.observe(this.holder);
  }

  draw() {
    const { data, series, plugins = [], bands, scales = {}, axes = {} } = this.make();
    const axis = {
      stroke: themeColor("--faint"),
      grid: { stroke: themeColor("--grid"), width: 1 },
      ticks: { stroke: themeColor("--grid"), width: 1 },
      font: "11px system-ui",
    };
    const steps = data[0];
    this.steps = steps;
    const options = {
      width: Math.max(this.holder.clientWidth, 120),
      height: this.height,
      legend: { show: false },
      cursor: {
        drag: { x: true, y: false, setScale: false },
        bind: { dblclick: () => () => zoomTo(null) },
        points: { size: 6 },
      },
      scales: { x: { time: false, range: () => this.limits() }, ...scales },
      axes: [
        { ...axis, size: 28 },
        { ...axis, size: 58, values: (_, ticks) => ticks.map(short), ...axes },
      ],
      series: [{}, ...series],
      bands,
      plugins,
      hooks: {
        setCursor: [(plot) => this.show(plot.cursor.idx)],
        setSelect: [(plot) => this.select(plot)],
      },
    };
    this.plot = new uPlot(options, data, this.holder);
    sizes.observe(this.holder);
  }

  // The first and the last step in sight; a single one gets some room around it.
  limits() {
    if (!this.steps.length) return [0, 1];
    const last = this.steps[this.steps.length - 1];
    const [low, high] = drawing.zoom || [this.steps[0], last];
    return low === high ? [low - 1, high + 1] : [low, high];
  }

  applyZoom() {
    if (!this.plot || !this.steps.length) return;
    const [min, max] = this.limits();
    this.plot.setScale("x", { min, max });
  }

  redraw() {
    if (!this.plot) return;
    this.plot.destroy();
    this.draw();
  }

  remove() {
    sight.unobserve(this.holder);
    sizes.unobserve(this.holder);
    if (this.plot) this.plot.destroy();
    this.plot = null;
  }

  show(index) {
    if (index === null || index === undefined) return;
    this.index = index;
    this.output.textContent = this.read(index);
  }

  select(plot) {
    const { left, width } = plot.select;
    if (width < 3) return;
    const low = plot.posToVal(left, "x");
    const high = plot.posToVal(left + width, "x");
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    zoomTo([low, high]);
  }

  key(event) {
    if (!this.plot || !this.steps.length) return;
    const last = this.steps.length - 1;
    const at = this.index === undefined ? last : this.index;
    const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last };
    if (event.key in moves) {
      const index = Math.min(last, Math.max(0, moves[event.key]));
      this.output.setAttribute("aria-live", "polite");
      this.show(index);
      const left = this.plot.valToPos(this.steps[index], "x");
      this.plot.setCursor({ left, top: this.height / 3 }, false);
    } else if (event.key === "+" || event.key === "-") {
      this.zoomAround(this.steps[at], event.key === "+" ? 0.5 : 2);
    } else if (event.key === "0") {
      zoomTo(null);
    } else {
      return;
    }
    event.preventDefault();
  }

  zoomAround(step, factor) {
    const first = this.steps[0];
    const last = this.steps[this.steps.length - 1];
    const [low, high] = drawing.zoom || [first, last];
    const half = ((high - low) * factor) / 2;
    const range = [Math.max(first, step - half), Math.min(last, step + half)];
    zoomTo(range[0] <= first && range[1] >= last ? null : range);
  }
}

// A chart of one metric with a line for each run that measured it.
function lineChart(title, name, runs, height = 190) {
  let lines = [];
  let steps = [];

  const make = () => {
    const measured = runs.filter((run) => run.shown && run.metrics[name]);
    steps = unitedSteps(measured);
    lines = measured.map((run) => {
      const values = placed(run.steps, run.metrics[name], steps);
      return { run, values, smooth: drawing.smoothing ? smoothed(values) : null };
    });

    const series = [];
    const data = [steps];
    for (const { run, values, smooth } of lines) {
      const few = values.filter((value) => value !== null).length < 40;
      const line = { stroke: run.color, width: 1.6, spanGaps: true, points: { show: few, size: 4 } };
      if (smooth) {
        series.push({ ...line, stroke: `${run.color}50`, width: 1, points: { show: false } });
        data.push(values);
      }
      series.push(line);
      data.push(smooth || values);
    }
    return { data, series };
  };

  const read = (index) => {
    const words = lines.map(({ run, values, smooth }) => {
      const also = smooth ? ` (smoothed ${short(smooth[index])})` : "";
      const value = `${short(values[index])}${also}`;
      return runs.length > 1 ? `${label(run)}: ${value}` : value;
    });
    return `step ${steps[index]}: ${words.join("; ")}`;
  };
  return new Chart(title, make, read, height);
}

function unitedSteps(runs) {
  if (runs.length === 1) return runs[0].steps;
  const all = new Set();
  for (const run of runs) for (const step of run.steps) all.add(step);
  return [...all].sort((a, b) => a - b);
}

// `values` at `own` steps, laid out over `steps`.
function placed(own, values, steps) {
  if (own === steps) return values;
  const byStep = new Map(own.map((step, i) => [step, values[i]]));
  return steps.map((step) => (byStep.has(step) ? byStep.get(step) : null));
}

// An exponential moving average that begins without a bias towards 0.
function smoothed(values) {
  let mean = 0;
  let weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = drawing.smoothing * mean + (1 - drawing.smoothing) * value;
    weight = drawing.smoothing * weight + (1 - drawing.smoothing);
    return mean / weight;
  });
}

// Names and colours of the runs, with a box to hide each.
function runKeys(onchange) {
  const boxes = report.runs.map((run) => {
    const toggle = (event) => {
      run.shown = event.target.checked;
      onchange();
    };
    const box = element("input", { type: "checkbox", checked: run.shown, onchange: toggle });
    return element("label", { class: "inline" }, box, swatch(run.color), label(run));
  });
  return boxes;
}
