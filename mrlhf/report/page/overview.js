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
  ["held out", ["held_out"], JUDGED],
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
function overview() {
  const parts = [element("section", { "aria-label": "Summary" }, ...report.runs.map(verdict))];
  const answers = report.runs.filter((run) => run.validations.length).flatMap(beforeAndAfter);
  const [first, more] = highlightCards();
  const curves = element("div", { class: "grid" }, ...first);
  if (report.runs.length > 1) parts.push(element("h2", {}, "The runs beside each other"), comparison(), curves, ...answers);
  else parts.push(...answers, curves);
  if (more.length) {
    const rest = element("div", { class: "grid" });
    const box = element("details", {}, element("summary", {}, `${more.length} more curves`), rest);
    box.addEventListener("toggle", () => box.open && !rest.children.length && rest.append(...more));
    parts.push(box);
  }
  parts.push(element("h2", {}, "Alarms"), alarms());
  parts.push(element("h2", {}, "Where the time went"), ...report.runs.map(phaseTable));
  if (report.runs.some((run) => run.profiles.length)) parts.push(element("h2", {}, "Profiles"), profiles());
  parts.push(element("h2", {}, "Machines"), ...(report.runs.length > 1 ? report.runs.map(origin) : []), machines());
  parts.push(element("h2", {}, "Configuration"), configuration());
  return parts;
}

// The answers of the first and of the last validation to the same prompts.
function beforeAndAfter(run) {
  const [[begin, before], [end, after]] = run.validations;
  const prompts = withoutFrame(after.map((row) => row.prompt));
  const words = ({ response, score, stopped }) => [response, element("span", { class: "faint" }, ` ${stopped ? "" : "(cut off) "}${short(score)}`)];
  const cells = (row, i) => [prompts[i], ...[before[i], row].map((one) => (one ? element("span", {}, ...words(one)) : "–"))];
  const title = report.runs.length > 1 ? `${label(run)}: ` : "";
  const answers = table(["prompt", `step ${begin}`, `step ${end}`], after.slice(0, 12).map(cells));
  return [element("h2", {}, `${title}Held-out answers, before and after`), element("div", { class: "answers" }, answers)];
}

// Texts without what the chat template puts before and after each: whole lines, and special tokens.
function withoutFrame(texts) {
  const differ = new Set(texts).size > 1;
  const alike = (reach) => differ && texts.every((text) => reach(text) === reach(texts[0]));
  let head = texts[0]?.lastIndexOf("\n") + 1 || 0;
  while (head && !alike((text) => text.slice(0, head))) head = texts[0].lastIndexOf("\n", head - 2) + 1;
  let tail = texts[0]?.indexOf("<", head) ?? -1;
  while (tail >= 0 && !alike((text) => text.slice(tail - texts[0].length))) tail = texts[0].indexOf("<", tail + 1);
  return texts.map((text) => text.slice(head, tail < 0 ? undefined : tail - texts[0].length).trim());
}

// The metric by which the run is judged: its title and course.
function headline(run) {
  for (const [title, pattern] of HEADLINES) {
    for (const name of Object.keys(run.metrics).filter((name) => pattern.test(name))) {
      const found = course(run, name);
      if (found) return { title: `${title}${way(name)}`, ...found };
    }
  }
  return null;
}

function firstToLast({ first, last }) {
  return `${short(first.value)} → ${short(last.value)}${plusMinus(last)}`;
}

// One line for each run: did it learn, is it healthy, what next. Below it a chip for each check.
function verdict(run) {
  const lead = report.runs.length > 1 ? [swatch(run.color), element("strong", {}, ` ${label(run)}: `)] : [];
  const head = headline(run);
  const steps = run.steps.length ? run.steps[run.steps.length - 1] : 0;
  const state = Object.keys(run.summary).length ? "after" : "so far, after";
  const learned = head
    ? [element("span", { class: "headline" }, `${head.title} ${firstToLast(head)}`), ` ${state} ${steps} steps. `, ...bestStep(run, head)]
    : [`${steps} steps. `];
  const words = [run.alarms.length ? "" : "No alarm. ", element("span", { class: "next" }, `Next: ${advice(run, head)}`)];
  const line = element("p", { class: "verdict" }, ...lead, ...learned, ...words);
  return element("div", {}, line, element("p", { class: "chips" }, ...chips(run)), ...(report.runs.length > 1 ? [] : [origin(run)]));
}

// The best step and where its model is, beside the first and the last value. A test is asked at both
// ends alone, so that it is the validation which has a best step.
function bestStep(run, head) {
  const found = head.points.length > 2 ? head : judgedCourses(run)[0];
  const words = bestInWords(run, found);
  if (!words) return [];
  const of = found.name === head.name ? "" : ` of${way(found.name)}`;
  return [element("strong", {}, `${words[0].toUpperCase()}${words.slice(1)}${of}`), ` (${placeOf(run, found.best.step)}). `];
}

// Which run this is: method and model, when and where it ran, with which code, and by which command.
function origin(run) {
  const { config, origin: said } = run;
  const parts = [];
  const adv = config["algorithm.adv_estimator"];
  const kind = ["sft", "rm", "dpo"].find((name) => run.metrics[`${name}/loss`]);
  const names = { sft: "supervised fine-tuning", rm: "reward modelling", dpo: "DPO" };
  if (adv) parts.push(`PPO program, estimator ${adv}, loss ${config["actor.policy_loss.loss_mode"]}`);
  else if (kind) parts.push(names[kind]);
  const model = config["actor.path"] ?? config["model.path"];
  if (model) parts.push(`model ${model}`);
  if (said.began) {
    const date = new Date(1000 * said.began).toISOString().slice(0, 16).replace("T", " ");
    parts.push(`last start ${date} UTC, ran ${duration(said.updated - said.began)}`);
  }
  if (said.host) parts.push(`${said.ranks} rank${said.ranks === 1 ? "" : "s"} on ${said.host}`);
  if (said.code) parts.push(`mrlhf ${said.code}`);
  const lead = report.runs.length > 1 ? [swatch(run.color), ` ${label(run)}: `] : [];
  const command = said.command ? [" · ", element("code", {}, said.command)] : [];
  return element("p", { class: "faint origin" }, ...lead, parts.join(" · "), ...command);
}

function duration(seconds) {
  if (seconds < 120) return `${Math.round(seconds)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

function chips(run) {
  const names = Object.keys(run.metrics);
  const made = [];
  for (const [title, rules, pattern] of CHECKS) {
    const raised = run.alarms.filter((alarm) => rules.includes(alarm.name));
    if (!raised.length && !names.some((name) => pattern.test(name))) continue;
    // A run of an older version has no alarm for a fall.
    const fell = rules.includes("held_out") && judgedCourses(run).find(hasFallen);
    const worst = raised.find((alarm) => alarm.severity === "error") || raised[0] || (fell && { step: fell.last.step, message: bestInWords(run, fell) });
    const kind = worst ? (worst.severity === "error" ? "alarm" : "look") : "ok";
    const told = worst ? `step ${worst.step}: ${worst.message}` : "no alarm";
    made.push(element("span", { class: `chip ${kind}`, title: told }, `${title}: ${kind}${worst ? ` (step ${worst.step})` : ""}`));
  }
  return made;
}

// What to do now, by the alarms, or else by how the validation went, or the reward without one.
function advice(run, head) {
  const worst = run.alarms.find((alarm) => alarm.severity === "error") || run.alarms[run.alarms.length - 1];
  if (worst) return `${worst.name} at step ${worst.step}: change ${worst.key}.`;
  const judged = judgedCourses(run)[0];
  const found = judged || course(run, "critic/score/mean") || head;
  if (!found || (!judged && found.points.length < 6)) return "look at the samples, and train longer.";
  if (found.points.length < 2) return "it was validated once; set trainer.test_freq, so that its best step is known.";
  const better = trendOf(found);
  if (judged && (better < 0 || hasFallen(found))) return `it got worse towards the end, after step ${found.best.step}; keep the best step (trainer.export_best), or lower the learning rate.`;
  if (better < 0) return "it got worse towards the end; lower the learning rate.";
  if (!judged && /^critic/.test(found.name)) return `the training reward ${better ? "was still rising" : "has levelled off"}, and nothing held out was measured: set data.val_files before you trust it.`;
  if (better) return "it was still getting better at the end; train longer (trainer.total_steps).";
  return "it has levelled off; look at the samples, or make the task harder.";
}

function bestOfRun(run) {
  const found = judgedCourses(run)[0];
  return found ? `${short(found.best.value)} at step ${found.best.step} (${placeOf(run, found.best.step)})` : "–";
}

// A column for each run: how it ended, and the keys in which they differ.
function comparison() {
  const heads = report.runs.map(headline);
  const told = report.runs.map((run, i) => (heads[i] ? firstToLast(heads[i]) : "–"));
  const rows = [
    [heads.find((head) => head)?.title || "Result", ...told],
    ["best validation", ...report.runs.map((run) => bestOfRun(run))],
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
  return ` (${found[1] === "test" ? "test" : "validation"}, ${found[2] ? "sampled" : "greedy"})`;
}

// The cards of the main curves, and of the others. What was measured once or twice has no curve, and
// a metric that is equal to one before it is left out.
function highlightCards() {
  const cards = [];
  const seen = new Set();
  for (const [title, pattern, words] of HIGHLIGHTS) {
    for (const name of metricNames().filter((name) => pattern.test(name))) {
      const runs = report.runs.filter((run) => course(run, name));
      const content = JSON.stringify(runs.map((run) => run.metrics[name]));
      if (!runs.length || seen.has(content)) continue;
      seen.add(content);
      const numbers = runs.map((run) => {
        const found = course(run, name);
        const best = JUDGED.test(name) && bestInWords(run, found);
        const parts = [`${short(found.first.value)} → ${short(found.last.value)}`, ...(best ? [element("span", { class: "faint best" }, `  ${best}`)] : [])];
        return element("div", { class: "numbers" }, ...(report.runs.length > 1 ? [swatch(run.color), " "] : []), ...parts);
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
    return [phaseName(phase), Number(seconds.toFixed(1)), `${Math.round((100 * seconds) / whole)} %`, element("div", { class: "bar-room" }, bar)];
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
