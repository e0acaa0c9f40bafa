"use strict";
// Held-out results: their best step, where its model is, and whether they have fallen since.

const JUDGED = /^((val|test)(_sampled)?\/.*\/(acc@1|reward_mean)|val\/(loss|accuracy|rewards\/accuracies))$/;
const FALLS = /loss$/; // these fall while a run learns
const CHANCE = 0.0001; // of a fall that is called one in a run that only fluctuates

// The values of a metric as {name, sign, points: [{step, value, error}], first, best, last}; an error
// is null where it is not known.
function course(run, name) {
  const sign = FALLS.test(name) ? -1 : 1;
  const points = [];
  (run.metrics[name] || []).forEach((value, i) => {
    if (value !== null) points.push({ step: run.steps?.[i] ?? i, value, error: standardError(run, name, i) });
  });
  if (!points.length) return null;
  const best = points.reduce((a, b) => (sign * b.value > sign * a.value ? b : a));
  return { name, sign, points, first: points[0], best, last: points[points.length - 1] };
}

// What the run has measured, or what follows from the number of prompts for a share.
function standardError(run, name, i) {
  const measured = run.metrics[`se/${name}`];
  if (measured && measured[i] !== null) return measured[i];
  const prompts = run.summary?.held_out_prompts;
  const value = run.metrics[name][i];
  const share = (value * prompts + 2) / (prompts + 4);
  return prompts && name.endsWith("/acc@1") ? Math.sqrt((share * (1 - share)) / prompts) : null;
}

// The courses of the metrics by which a run is judged: accuracies, where there are some, and the
// one with most values first.
function judgedCourses(run) {
  const names = Object.keys(run.metrics).filter((name) => JUDGED.test(name));
  const shares = names.filter((name) => /acc/.test(name));
  const courses = (shares.length ? shares : names).map((name) => course(run, name)).filter(Boolean);
  return courses.sort((a, b) => b.points.length - a.points.length || /_sampled/.test(b.name) - /_sampled/.test(a.name));
}

// Whether the last value is below the best one by more than the noise of the held-out rows; the
// bound on all pairs of values is a little above that of the alarm.
function hasFallen({ sign, points, best, last }) {
  if (best.error === null || last.error === null) return false;
  const pairs = Math.max(1, (points.length * (points.length - 1)) / 2);
  const error = Math.max(...points.map((point) => point.error ?? 0));
  const noise = Math.sqrt(2 * Math.log(pairs / CHANCE)) * Math.SQRT2 * error;
  return noise > 0 && sign * (best.value - last.value) > noise;
}

// Where the model of a step is.
function placeOf(run, step) {
  const name = `step_${String(step).padStart(6, "0")}`;
  if (step === 0) return "the model that the run began with";
  if (step === run.summary.best_step) return run.summary.best_checkpoint;
  if (run.checkpoints.includes(name)) return `checkpoints/${name}`;
  if (step === run.summary.steps && run.summary.checkpoint) return run.summary.checkpoint;
  return "not kept; see trainer.export_best";
}

// The best step in words, if the run was better then than at its end; otherwise "".
function bestInWords(run, found) {
  if (!found || found.best.value === found.last.value) return "";
  return `best ${short(found.best.value)}${plusMinus(found.best)} at step ${found.best.step}`;
}

function plusMinus({ error }) {
  return error === null ? "" : ` ± ${short(Number(error.toPrecision(2)))}`;
}

// How a metric went towards its end: 1 better, -1 worse, 0 neither, by thirds of its values.
function trendOf({ sign, points }) {
  const values = points.map((point) => point.value);
  const third = Math.max(1, Math.floor(values.length / 3));
  const mean = (some) => some.reduce((sum, value) => sum + value, 0) / some.length;
  const change = sign * (mean(values.slice(-third)) - mean(values.slice(-2 * third, -third)));
  const error = points[points.length - 1].error;
  const least = error === null ? 0.05 * (Math.max(...values) - Math.min(...values)) : (error * Math.SQRT2) / Math.sqrt(third);
  return change > least ? 1 : change < -least ? -1 : 0;
}
