"use strict";
// The first view: did the run learn, and is it healthy?

const HIGHLIGHTS = [
  ["Reward", /^critic\/score\/mean$/, "The mean score of the responses. It rises while the run learns."],
  ["Held-out accuracy", /^(val|test)(_sampled)?\/.*\/acc@1$/, "The share of right answers to prompts that are not trained on."],
  ["Held-out reward", /^(val|test)(_sampled)?\/.*\/reward_mean$/, "If it falls while the reward rises, the run learns the training prompts by heart."],
  ["Loss", /^(sft|rm|dpo|val)\/loss$/, "It falls while the run learns."],
  ["Pair accuracy", /^(val|rm|dpo)\/(rewards\/)?accurac(y|ies)$/, "The share of pairs that are ranked right; 0.5 is chance."],
  ["KL to the reference", /^actor\/(reward_kl_penalty|kl_loss)$/, "How far the policy has gone from where it began. It grows slowly; a jump is a bad sign."],
  ["KL of the update", /^actor\/ppo_kl$/, "How far one update moves the policy. An alarm is raised above 0.3; above about 0.1 a lower learning rate is worth a try."],
  ["Entropy", /^actor\/entropy$/, "How varied the responses are. Near 0 the policy has stopped exploring."],
  ["Response length", /^response_length\/mean$/, "Tokens. If it runs up to the limit, responses are cut off."],
  ["Share of responses cut off", /^response_length\/clip_ratio$/, "Responses that the length limit ended."],
  ["Clip fraction", /^actor\/pg_clipfrac$/, "The share of tokens whose ratio is clipped. Above 0.5 most of the batch does not train."],
  ["Engine against trainer", /^training\/rollout_probs_diff_max$/, "The largest difference between a token's probability in the engine and in the trainer. Near 1 they do not hold the same policy."],
  ["Gradient norm", /^(actor|sft|rm|dpo)\/grad_norm$/, "Before clipping. Spikes say that single batches pull hard."],
];

const IMPORTANT = /^(seed|actor\.(path|tp|pp|cp|ep|ppo_mini_batch_size|ppo_epochs|clip_ratio|loss_agg_mode|policy_loss|use_kl_loss|kl_loss_coef|optim\.lr)|critic\.optim\.lr|model\.path|optim\.lr|algorithm\.(adv_estimator|gamma|lam|use_kl_in_reward|kl_ctrl\.kl_coef)|rollout\.(engine|n|temperature|tp)|reward\.terms|data\.(train_files|train_batch_size|batch_size|max_prompt_length|max_response_length)|trainer\.(total_steps|total_epochs))$/;

const MAIN_CURVES = 6;

// What a healthy run is checked for: the alarms that watch it, and the metric that they read.
const CHECKS = [
  ["KL", ["kl_explosion"], /^actor\/ppo_kl$/],
  ["entropy", ["entropy_collapse"], /^actor\/entropy$/],
  ["clipping", ["clip_fraction"], /^actor\/pg_clipfrac$/],
  ["length", ["truncation"], /^response_length\/clip_ratio$/],
  ["reward", ["over_optimisation", "equal_scores", "equal_groups", "constant_term"], /^critic\/score\/mean$/],
  ["critic", ["value_loss_not_falling"], /^critic\/vf_loss$/],
  ["gradient", ["gradient_spike", "zero_learning_rate"], /^(actor|sft|rm|dpo)\/grad_norm$/],
  ["engine", ["engine_mismatch", "everything_rejected", "zero_weights"], /^training\/rollout_probs_diff_max$/],
  ["ranks", ["slow_rank", "slow_update"], /^timing_s\/step$/],
];

// The metric by which a run is judged, the best first.
const HEADLINES = [
  ["Held-out accuracy", /^test_sampled\/.*\/acc@1$/],
  ["Held-out accuracy", /^val_sampled\/.*\/acc@1$/],
  ["Held-out accuracy", /^(test|val)\/.*\/acc@1$/],
  ["Held-out reward", /^(test|val)(_sampled)?\/.*\/reward_mean$/],
  ["Pairs ranked right", /^(val|rm|dpo)\/(rewards\/)?accurac(y|ies)$/],
  ["Held-out loss", /^val\/loss$/],
  ["Reward", /^critic\/score\/mean$/],
  ["Loss", /^(sft|rm|dpo)\/loss$/],
];
const FALLS = /loss$/; // these fall while a run learns

function overview() {
  const parts = [element("section", { "aria-label": "Summary" }, ...report.runs.map(verdict))];
  if (report.runs.length > 1) parts.push(element("h2", {}, "The runs beside each other"), comparison());
  const [first, more] = highlightCards();
  parts.push(element("div", { class: "grid" }, ...first));
  if (more.length) {
    const rest = element("div", { class: "grid" });
    const box = element("details", {}, element("summary", {}, `${more.length} more curves`), rest);
    box.addEventListener("toggle", () => box.open && !rest.children.length && rest.append(...more));
    parts.push(box);
  }
  parts.push(element("h2", {}, "Alarms"), alarms());
  parts.push(element("h2", {}, "Where the time went"), ...report.runs.map(phaseTable));
  if (report.runs.some((run) => run.profiles.length)) parts.push(element("h2", {}, "Profiles"), profiles());
  parts.push(element("h2", {}, "Machines"), machines());
  parts.push(element("h2", {}, "Configuration"), configuration());
  return parts;
}

function firstAndLast(values) {
  const known = values.filter((value) => value !== null);
  return known.length ? [known[0], known[known.length - 1]] : null;
}

// The metric by which the run is judged: its name, and its first and last value.
function headline(run) {
  for (const [title, pattern] of HEADLINES) {
    for (const name of Object.keys(run.metrics).filter((name) => pattern.test(name))) {
      const ends = firstAndLast(run.metrics[name]);
      if (ends) return { title: `${title}${way(name)}`, name, first: ends[0], last: ends[1] };
    }
  }
  return null;
}

// The standard error of a share, from the number of held-out prompts; "" where that is not known.
function uncertainty(run, { name, last }) {
  const prompts = run.summary.held_out_prompts;
  if (!prompts || !/^(val|test)(_sampled)?\/.*\/acc@1$/.test(name)) return "";
  return ` ± ${short(Number(Math.sqrt((last * (1 - last)) / prompts).toPrecision(2)))}`;
}

// One line for each run: did it learn, is it healthy, what next. Below it a chip for each check.
function verdict(run) {
  const lead = report.runs.length > 1 ? [swatch(run.color), element("strong", {}, ` ${label(run)}: `)] : [];
  const head = headline(run);
  const steps = run.steps.length ? run.steps[run.steps.length - 1] : 0;
  const state = Object.keys(run.summary).length ? "after" : "so far, after";
  const learned = head
    ? [element("span", { class: "headline" }, `${head.title} ${short(head.first)} → ${short(head.last)}${uncertainty(run, head)}`), ` ${state} ${steps} steps. `]
    : [`${steps} steps. `];
  const words = [run.alarms.length ? "" : "No alarm. ", element("span", { class: "next" }, `Next: ${advice(run, head)}`)];
  const line = element("p", { class: "verdict" }, ...lead, ...learned, ...words);
  return element("div", {}, line, element("p", { class: "chips" }, ...chips(run)));
}

function chips(run) {
  const names = Object.keys(run.metrics);
  const made = [];
  for (const [title, rules, pattern] of CHECKS) {
    const raised = run.alarms.filter((alarm) => rules.includes(alarm.name));
    if (!raised.length && !names.some((name) => pattern.test(name))) continue;
    const worst = raised.find((alarm) => alarm.severity === "error") || raised[0];
    const kind = worst ? (worst.severity === "error" ? "alarm" : "look") : "ok";
    const told = worst ? `step ${worst.step}: ${worst.message}` : "no alarm";
    made.push(element("span", { class: `chip ${kind}`, title: told }, `${title}: ${kind}${worst ? ` (step ${worst.step})` : ""}`));
  }
  return made;
}

// What to do now, by the alarms, or else by how the last third of the curve went.
function advice(run, head) {
  const worst = run.alarms.find((alarm) => alarm.severity === "error") || run.alarms[run.alarms.length - 1];
  if (worst) return `${worst.name} at step ${worst.step}: change ${worst.key}.`;
  const name = head && run.metrics[head.name].filter((value) => value !== null).length >= 6 ? head.name : "critic/score/mean";
  const values = (run.metrics[name] || []).filter((value) => value !== null);
  if (values.length < 6) return "look at the samples, and train longer.";
  const third = Math.floor(values.length / 3);
  const mean = (some) => some.reduce((sum, value) => sum + value, 0) / some.length;
  const spread = Math.max(...values) - Math.min(...values);
  const sign = FALLS.test(name) ? -1 : 1;
  const change = sign * (mean(values.slice(-third)) - mean(values.slice(-2 * third, -third)));
  if (change > 0.05 * spread) return "it was still getting better at the end; train longer (trainer.total_steps).";
  if (change < -0.05 * spread) return "it got worse towards the end; keep the best step (trainer.export_best), or lower the learning rate.";
  return "it has levelled off; look at the samples, or make the task harder.";
}

// A column for each run: how it ended, and the keys in which they differ.
function comparison() {
  const heads = report.runs.map(headline);
  const told = report.runs.map((run, i) => (heads[i] ? `${short(heads[i].first)} → ${short(heads[i].last)}${uncertainty(run, heads[i])}` : "–"));
  const rows = [
    [heads.find((head) => head)?.title || "Result", ...told],
    ["steps", ...report.runs.map((run) => run.steps[run.steps.length - 1] ?? 0)],
    ["alarms", ...report.runs.map((run) => run.alarms.length)],
  ];
  for (const key of report.differing) {
    const values = report.runs.map((run) => {
      const value = run.config[key];
      return value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value);
    });
    rows.push([element("code", {}, key), ...values]);
  }
  return table(["", ...report.runs.map(label)], rows);
}

// What the runs themselves have found wrong in their metrics.
function alarms() {
  const several = report.runs.length > 1;
  const rows = [];
  for (const run of report.runs) {
    for (const alarm of run.alarms) {
      const words = [alarm.step, alarm.name, alarm.message, alarm.cause, element("code", {}, alarm.key)];
      rows.push(several ? [label(run), ...words] : words);
    }
  }
  if (!rows.length) return element("p", { class: "faint" }, "None.");
  const titles = ["step", "alarm", "what was seen", "likely cause", "key to change"];
  return table(several ? ["run", ...titles] : titles, rows);
}

// How held-out prompts were answered for a metric.
function way(name) {
  const found = /^(val|test)(_sampled)?\/.*\/(acc@1|reward_mean)$/.exec(name);
  if (!found) return "";
  return ` (${found[1] === "test" ? "test, " : ""}${found[2] ? "sampled" : "greedy"})`;
}

// The cards of the main curves, and of the others. What was measured once or twice has no curve, and
// a metric that is equal to one before it is left out.
function highlightCards() {
  const cards = [];
  const seen = new Set();
  for (const [title, pattern, words] of HIGHLIGHTS) {
    for (const name of metricNames().filter((name) => pattern.test(name))) {
      const runs = report.runs.filter((run) => run.metrics[name] && firstAndLast(run.metrics[name]));
      const content = JSON.stringify(runs.map((run) => run.metrics[name]));
      if (!runs.length || seen.has(content)) continue;
      seen.add(content);
      const numbers = runs.map((run) => {
        const [first, last] = firstAndLast(run.metrics[name]);
        return element("div", { class: "numbers" }, ...(report.runs.length > 1 ? [swatch(run.color), " "] : []), `${short(first)} → ${short(last)}`);
      });
      const heading = `${title}${way(name)}`;
      const most = Math.max(...runs.map((run) => run.metrics[name].filter((value) => value !== null).length));
      const figure = most > 2 ? lineChart(heading, name, report.runs, 130).figure : element("figure", {}, element("figcaption", {}, heading));
      const card = element("section", { class: "card" }, figure, ...numbers, element("p", { class: "faint" }, words), element("span", { class: "name" }, name));
      cards.push([most > 2, card]);
    }
  }
  const ordered = [...cards.filter(([drawn]) => drawn), ...cards.filter(([drawn]) => !drawn)].map(([, card]) => card);
  return [ordered.slice(0, MAIN_CURVES), ordered.slice(MAIN_CURVES)];
}

function metricNames() {
  const names = new Set();
  for (const run of report.runs) for (const name of Object.keys(run.metrics)) names.add(name);
  return [...names].sort();
}

function phaseTable(run) {
  const totals = [];
  for (const [name, values] of Object.entries(run.metrics)) {
    if (!name.startsWith("timing_s/") || name === "timing_s/step") continue;
    totals.push([name.slice(9), values.reduce((sum, value) => sum + (value || 0), 0)]);
  }
  totals.sort((a, b) => b[1] - a[1]);
  const longest = totals.length ? totals[0][1] : 1;
  const whole = totals.reduce((sum, [, seconds]) => sum + seconds, 0) || 1;

  const rows = totals.map(([phase, seconds]) => {
    const bar = element("div", { class: "bar" });
    bar.style.width = `${(100 * seconds) / longest}%`;
    return [phase, Number(seconds.toFixed(1)), `${Math.round((100 * seconds) / whole)} %`, element("div", { class: "bar-room" }, bar)];
  });
  const title = report.runs.length > 1 ? [element("h3", {}, label(run))] : [];
  return element("section", {}, ...title, table(["phase", "seconds", "share", ""], rows));
}

// Links to the traces, which other viewers show.
function profiles() {
  const files = report.runs.flatMap((run) => run.profiles);
  const links = files.map((file) => element("li", {}, element("a", { href: encodeURI(file) }, file)));
  const words = "Open a trace in ui.perfetto.dev, and a .pickle in pytorch.org/memory_viz.";
  return element("section", {}, element("p", { class: "faint" }, words), element("ul", {}, ...links));
}

// Ranks with the same device on the same host share a line.
function machines() {
  const rows = [];
  for (const run of report.runs) {
    const alike = new Map();
    for (const process of Object.values(run.processes)) {
      const key = JSON.stringify([process.host, process.device, process.threads, process.torch]);
      alike.set(key, (alike.get(key) || 0) + 1);
    }
    for (const [key, ranks] of alike) {
      const [host, device, threads, torch] = JSON.parse(key);
      rows.push([label(run), host, ranks, device, threads, torch]);
    }
  }
  if (!rows.length) return element("p", { class: "faint" }, "No rank has described itself.");
  return table(["run", "host", "ranks", "device", "threads a rank", "torch"], rows);
}

function configuration() {
  const every = new Set();
  for (const run of report.runs) for (const key of Object.keys(run.config)) every.add(key);
  const keys = [...every];
  const important = keys.filter((key) => IMPORTANT.test(key) || report.differing.includes(key));
  const all = element("details", {}, element("summary", {}, `All ${keys.length} keys`));
  all.addEventListener("toggle", () => {
    if (all.open && all.children.length === 1) all.append(configTable(keys));
  });
  return element("section", {}, configTable(important), all);
}

function configTable(keys) {
  const rows = keys.map((key) => {
    const values = report.runs.map((run) => {
      const value = run.config[key];
      return value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value);
    });
    return [element("code", {}, key), ...values];
  });
  return table(["key", ...report.runs.map(label)], rows);
}
