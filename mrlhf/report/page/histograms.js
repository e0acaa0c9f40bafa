"use strict";
// How a number of the samples is distributed at each step: shades for the counts, a line for the
// median. uPlot draws the axes and the line, and this file the shades below them.

const BINS = 24;

function histogram(title, run, column) {
  let found = null;
  const make = () => {
    found = counts(run, column);
    return {
      data: [found.steps, found.medians],
      series: [{ stroke: run.color, width: 2, points: { show: true, size: 5 } }],
      scales: { y: { auto: false, range: [found.low, found.high] } },
      plugins: [{ hooks: { drawClear: [(plot) => shade(plot, found)] } }],
    };
  };
  const read = (index) => {
    const [low, middle, high] = found.spreads[index];
    const number = found.sizes[index];
    return `step ${found.steps[index]}: ${number} samples, median ${short(middle)}, 10 % below ${short(low)}, 10 % above ${short(high)}`;
  };
  return new Chart(title, make, read, 220).figure;
}

function counts(run, column) {
  const bySteps = new Map();
  run.samples.step.forEach((step, i) => {
    const value = run.samples[column][i];
    if (value === null) return;
    if (!bySteps.has(step)) bySteps.set(step, []);
    bySteps.get(step).push(value);
  });

  const steps = [...bySteps.keys()].sort((a, b) => a - b);
  const every = [...bySteps.values()];
  let low = Math.min(...every.map((values) => Math.min(...values)));
  let high = Math.max(...every.map((values) => Math.max(...values)));
  if (low === high) [low, high] = [low - 0.5, high + 0.5];
  const width = (high - low) / BINS;

  const found = { steps, low, high, width, medians: [], spreads: [], sizes: [], shares: [] };
  for (const step of steps) {
    const values = bySteps.get(step).sort((a, b) => a - b);
    const shares = new Array(BINS).fill(0);
    for (const value of values) shares[Math.min(BINS - 1, Math.floor((value - low) / width))]++;
    found.shares.push(shares.map((count) => count / values.length));
    found.spreads.push([0.1, 0.5, 0.9].map((share) => quantile(values, share)));
    found.medians.push(quantile(values, 0.5));
    found.sizes.push(values.length);
  }
  return found;
}

function shade(plot, found) {
  const context = plot.ctx;
  const { left, top, width, height } = plot.bbox;
  context.save();
  context.beginPath();
  context.rect(left, top, width, height);
  context.clip();
  context.fillStyle = themeColor("--bar");

  found.steps.forEach((step, i) => {
    const before = i ? (found.steps[i - 1] + step) / 2 : step - gap(found.steps) / 2;
    const after = i + 1 < found.steps.length ? (found.steps[i + 1] + step) / 2 : step + gap(found.steps) / 2;
    const x = plot.valToPos(before, "x", true);
    const wide = Math.max(1, plot.valToPos(after, "x", true) - x);
    found.shares[i].forEach((share, bin) => {
      if (!share) return;
      const y = plot.valToPos(found.low + (bin + 1) * found.width, "y", true);
      const tall = plot.valToPos(found.low + bin * found.width, "y", true) - y;
      context.globalAlpha = 0.1 + 0.75 * Math.sqrt(share);
      context.fillRect(x, y, wide, Math.max(1, tall));
    });
  });
  context.restore();
}

function gap(steps) {
  return steps.length > 1 ? steps[1] - steps[0] : 1;
}
