"use strict";
// The first view: did the run learn, and is it healthy?

const HIGHLIGHTS = [
  ["Reward", /^critic\/score\/mean$/, "The mean score of the responses. It rises while the run learns."],
  ["Held-out accuracy", /^(val|test)(_sampled)?\/.*\/acc@1$/, "The share of right answers to prompts that are not trained on."],
  ["Held-out reward", /^(val|test)(_sampled)?\/.*\/reward_mean$/, "If it falls while the reward rises, the run learns the training prompts by heart."],
  ["Loss", /^(sft|rm|dpo|val)\/loss$/, "It falls while the run learns."],
  ["Pair accuracy", /^(val|rm|dpo)\/(rewards\/)?accurac(y|ies)$/, "The share of pairs that are ranked right; 0.5 is chance."],
  ["KL to the reference", /^actor\/(reward_kl_penalty|kl_loss)$/, "How far the policy has gone from where it began. It grows slowly; a jump is a bad sign."],
  ["KL of the update", /^actor\/ppo_kl$/, "How far one update moves the policy. Above about 0.1 the learning rate is too high."],
  ["Entropy", /^actor\/entropy$/, "How varied the responses are. Near 0 the policy has stopped exploring."],
  ["Response length", /^response_length\/mean$/, "Tokens. If it runs up to the limit, responses are cut off."],
  ["Share of responses cut off", /^response_length\/clip_ratio$/, "Responses that the length limit ended."],
  ["Clip fraction", /^actor\/pg_clipfrac$/, "The share of tokens whose ratio is clipped. Above 0.5 most of the batch does not train."],
  ["Engine against trainer", /^training\/rollout_probs_diff_max$/, "The largest difference between a token's probability in the engine and in the trainer. Near 1 they do not hold the same policy."],
  ["Gradient norm", /^(actor|sft|rm|dpo)\/grad_norm$/, "Before clipping. Spikes say that single batches pull hard."],
];

const IMPORTANT = /^(seed|actor\.(path|tp|pp|cp|ep|ppo_mini_batch_size|ppo_epochs|clip_ratio|loss_agg_mode|policy_loss|use_kl_loss|kl_loss_coef|optim\.lr)|critic\.optim\.lr|model\.path|optim\.lr|algorithm\.(adv_estimator|gamma|lam|use_kl_in_reward|kl_ctrl\.kl_coef)|rollout\.(engine|n|temperature|tp)|reward\.terms|data\.(train_files|train_batch_size|batch_size|max_prompt_length|max_response_length)|trainer\.(total_steps|total_epochs))$/;

function overview() {
  const parts = [verdicts()];
  if (report.runs.length > 1) parts.push(element("div", { class: "keys" }, ...report.runs.map(runName)));
  parts.push(element("h2", {}, "Alarms"), alarms());
  parts.push(element("div", { class: "grid" }, ...highlightCards()));
  parts.push(element("h2", {}, "Where the time went"), ...report.runs.map(phaseTable));
  if (report.runs.some((run) => run.profiles.length)) parts.push(element("h2", {}, "Profiles"), profiles());
  parts.push(element("h2", {}, "Machines"), machines());
  parts.push(element("h2", {}, "Configuration"), configuration());
  return parts;
}

function runName(run) {
  return element("span", {}, swatch(run.color), label(run));
}

function firstAndLast(values) {
  const known = values.filter((value) => value !== null);
  return known.length ? [known[0], known[known.length - 1]] : null;
}

// One sentence for each run: what it has learned so far.
function verdicts() {
  const sentences = report.runs.map((run) => {
    const last = run.steps.length ? run.steps[run.steps.length - 1] : 0;
    const learned = [];
    for (const [title, pattern] of HIGHLIGHTS.slice(0, 5)) {
      for (const name of Object.keys(run.metrics).filter((name) => pattern.test(name))) {
        const ends = firstAndLast(run.metrics[name]);
        if (!ends) continue;
        learned.push(`${title.toLowerCase()}${way(name)} went from ${short(ends[0])} to ${short(ends[1])}`);
      }
    }
    const state = Object.keys(run.summary).length ? "has finished" : "has not finished";
    const news = learned.join("; ");
    const text = `${last} steps; the run ${state}. ${news.charAt(0).toUpperCase()}${news.slice(1)}.`;
    const lead = report.runs.length > 1 ? [swatch(run.color), element("strong", {}, ` ${label(run)}: `)] : [];
    return element("p", { class: "verdict" }, ...lead, text);
  });
  return element("section", { "aria-label": "Summary" }, ...sentences);
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

function highlightCards() {
  const cards = [];
  for (const [title, pattern, advice] of HIGHLIGHTS) {
    for (const name of metricNames().filter((name) => pattern.test(name))) {
      const runs = report.runs.filter((run) => run.metrics[name] && firstAndLast(run.metrics[name]));
      if (!runs.length) continue;
      const numbers = runs.map((run) => {
        const [first, last] = firstAndLast(run.metrics[name]);
        return element("div", { class: "numbers" }, ...(report.runs.length > 1 ? [swatch(run.color), " "] : []), `${short(first)} → ${short(last)}`);
      });
      const chart = lineChart(`${title}${way(name)}`, name, report.runs, 130);
      const words = element("p", { class: "faint" }, advice);
      cards.push(element("section", { class: "card" }, chart.figure, ...numbers, words, element("span", { class: "name" }, name)));
    }
  }
  return cards;
}

function metricNames() {
  const names = new Set();
  for (const run of report.runs) for (const name of Object.keys(run.metrics)) names.add(name);
  return [...names].sort();
}

function phaseTable(run) {
  const totals = [];
  for (const [name, values] of Object.entries(run.metrics)) {
    if (!name.startsWith("timing_s/")) continue;
    totals.push([name.slice(9), values.reduce((sum, value) => sum + (value || 0), 0)]);
  }
  totals.sort((a, b) => b[1] - a[1]);
  const longest = totals.length ? totals[0][1] : 1;

  const rows = totals.map(([phase, seconds]) => {
    const bar = element("div", { class: "bar" });
    bar.style.width = `${(100 * seconds) / longest}%`;
    return [phase, Number(seconds.toFixed(1)), element("div", { class: "bar-room" }, bar)];
  });
  const title = report.runs.length > 1 ? [element("h3", {}, label(run))] : [];
  return element("section", {}, ...title, table(["phase", "seconds", ""], rows));
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
  const first = report.differing.length
    ? element("p", {}, `The runs differ in ${report.differing.join(", ")}.`)
    : "";
  const all = element("details", {}, element("summary", {}, `All ${keys.length} keys`));
  all.addEventListener("toggle", () => {
    if (all.open && all.children.length === 1) all.append(configTable(keys));
  });
  return element("section", {}, first, configTable(important), all);
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
