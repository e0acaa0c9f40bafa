"use strict";
// Episodes of several turns: the parts of a response, and what is said of the whole. A dump without
// episodes has one part, which has no title.

// The parts of a response in order: turns of the policy, and what it was told between them. Where
// the policy began to read anew, what it was told has the number of the context.
function partsOf(sample) {
  const { episode, tokens } = sample;
  if (!episode) return [{ begin: 0, end: tokens.length }];
  const parts = [];
  let at = 0;
  const contexts = episode.context_begins;
  const tell = (end) => {
    for (const next of [...contexts.filter((begin) => begin >= at && begin < end), end]) {
      if (next > at) parts.push({ begin: at, end: next, told: true, context: contexts.indexOf(at) + 1 });
      at = next;
    }
  };
  episode.turn_begins.forEach((begin, i) => {
    tell(begin);
    at = episode.turns[i] ?? tokens.length; // an episode may fail within a turn
    if (at > begin) parts.push({ begin, end: at, turn: i + 1, reward: episode.turn_rewards[i] });
  });
  tell(tokens.length);
  return parts;
}

// The versions of the policy that drew the tokens of a part; nothing if the dump does not say so.
function versionsOf(sample, part) {
  const drawn = (sample.versions ?? []).slice(part.begin, part.end).filter((version) => version >= 0);
  return [...new Set(drawn)];
}

function versionWords(versions) {
  if (!versions.length) return [];
  return [`policy version${versions.length > 1 ? "s" : ""} ${versions.join(", ")}`];
}

function partName(episode, part) {
  const context = episode.context_begins.filter((begin) => begin <= part.begin).length;
  const role = episode.context_roles[context];
  const whose = role ? ` (${role})` : "";
  if (!part.told) return `Turn ${part.turn}${whose}`;
  return part.context ? `Reads anew: context ${part.context + 1}${whose}` : "Tool or environment";
}

function partNode(sample, part, spans) {
  const tokens = spans.slice(part.begin, part.end);
  if (!sample.episode) return element("div", {}, ...tokens);
  const length = `${tokens.length} token${tokens.length === 1 ? "" : "s"}`;
  const words = [partName(sample.episode, part), length];
  if (versionsOf(sample, { begin: 0, end: spans.length }).length > 1) words.push(...versionWords(versionsOf(sample, part)));
  if (part.reward !== undefined) words.push(`turn reward ${short(part.reward)}`);
  const title = element("div", { class: "part-title" }, words.join(" · "));
  return element("div", { class: part.told ? "part told" : "part" }, title, ...tokens);
}

// What happened in an episode beside its tokens.
function episodeSummary(sample) {
  const { episode } = sample;
  if (!episode) return [];
  const calls = Object.entries(episode.tools).map(([name, count]) => `${name === "error" ? "unreadable" : name} × ${count}`);
  const words = [
    `${episode.turns.length} turn${episode.turns.length === 1 ? "" : "s"}`,
    calls.length ? `calls: ${calls.join(", ")}` : "no calls",
    `${episode.errors} error${episode.errors === 1 ? "" : "s"}`,
    `waited ${short(episode.waited_s)} s for tools and environment`,
  ];
  if (episode.turn_rewards.length) words.push(`turn rewards add up to ${short(episode.turn_rewards.reduce((a, b) => a + b, 0))}`);
  const nodes = [element("p", { class: "faint episode" }, words.join(" · "))];
  if (episode.failure) nodes.unshift(element("p", { class: "failure" }, `Failed, so nothing of it trains: ${episode.failure}`));
  return nodes;
}
