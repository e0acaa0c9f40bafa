"use strict";
// Reads the data that the page carries. What is large stands in blocks after the script: base64 of
// compressed bytes, which are unpacked when somebody looks at them.

const report = JSON.parse(document.getElementById("report").textContent);
const COLORS = ["#2f7ed8", "#e4572e", "#2a9d5b", "#9b5de5", "#c78c06", "#0fa3b1", "#d6336c", "#7a8288"];

report.runs.forEach((run, number) => {
  run.number = number;
  run.color = COLORS[number % COLORS.length];
  run.shown = true;
  run.count = run.samples.step.length;
  run.texts = []; // [prompt, response] of each sample, as far as unpacked
});

const naming = { key: report.differing.length ? report.differing[0] : "" };

// What a run is called: its directory, or the value of the key by which runs are told apart.
function label(run) {
  if (!naming.key) return run.name;
  const others = report.runs.filter((other) => valueOf(other) === valueOf(run));
  const value = `${naming.key}=${valueOf(run)}`;
  return others.length > 1 ? `${value} (${run.name})` : value;
}

function valueOf(run) {
  const value = run.config[naming.key];
  return value === undefined ? "unset" : typeof value === "string" ? value : JSON.stringify(value);
}

// A phase in words; the names of others are the program's own.
function phaseName(phase) {
  return report.phases[phase] ?? phase;
}

const loaded = new Promise((resolve) => {
  if (document.readyState !== "loading") resolve();
  else document.addEventListener("DOMContentLoaded", resolve);
});

// The text of a block; a block that the browser has not read yet is waited for.
async function block(name) {
  const node = document.getElementById(name);
  if (node && node.nextSibling) return node.textContent;
  await loaded;
  return document.getElementById(name).textContent;
}

async function inflate(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

const decoder = new TextDecoder();

// The phases of each recorded step by rank, read on first use.
async function phasesOf(run) {
  if (!run.phases) run.phases = JSON.parse(await block(`phases-${run.number}`));
  return run.phases;
}

// Unpack the texts of a run, one block after the other, so that the page stays responsive.
const unpacking = new Map();

function unpackTexts(run) {
  if (!unpacking.has(run)) {
    unpacking.set(run, unpackAll(run));
  }
  return unpacking.get(run);
}

async function unpackAll(run) {
  for (let number = 0; number < run.textBlocks; number++) {
    const bytes = await inflate(await block(`texts-${run.number}-${number}`));
    for (const [prompt, response] of JSON.parse(decoder.decode(bytes))) {
      run.texts.push([prompt, response, `${prompt}\n${response}`.toLowerCase()]);
    }
    await new Promise((resolve) => setTimeout(resolve, 0));
  }
}

// A sample with its tokens: `numbers` has an array for each quantity.
async function openSample(run, index) {
  const { block: number, begin, end } = run.samples;
  const whole = await block(`tokens-${run.number}-${number[index]}`);
  const bytes = await inflate(whole.slice(begin[index], end[index]));
  const newline = bytes.indexOf(10);
  const sample = JSON.parse(decoder.decode(bytes.subarray(0, newline)));

  const length = sample.tokens.length;
  sample.numbers = {};
  let place = newline + 1;
  for (const [name, unit] of Object.entries(sample.units)) {
    const high = bytes.subarray(place, place + length);
    const low = bytes.subarray(place + length, place + 2 * length);
    const numbers = new Float32Array(length);
    for (let i = 0; i < length; i++) numbers[i] = half((high[i] << 8) | low[i]) * unit;
    sample.numbers[name] = numbers;
    place += 2 * length;
  }
  return sample;
}

// The number that 16 bits stand for, IEEE 754 binary16.
function half(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 0x1f;
  const fraction = bits & 0x3ff;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

// The samples of the same prompt, in the order of steps.
function samePrompt(run, index) {
  const { uid, data_source: source } = run.samples;
  const found = [];
  for (let i = 0; i < run.count; i++) {
    if (uid[i] === uid[index] && source[i] === source[index]) found.push(i);
  }
  return found;
}
