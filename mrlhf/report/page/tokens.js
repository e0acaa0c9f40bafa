"use strict";
// One sample: its prompt, and its tokens coloured by one of their numbers. The mouse, or the arrow
// keys, choose the token whose numbers are shown.

const coloring = { quantity: "advantage" };

// The quantities that the mask leaves without a meaning where a token does not train.
const EVERYWHERE = new Set(["loss mask", "log-probability", "entropy", "trainer - engine"]);

class SampleView {
  constructor(run, index, sample, heading) {
    this.run = run;
    this.index = index;
    this.sample = sample;
    this.active = -1;
    this.facts = element("div", { class: "facts", role: "status", "aria-live": "polite" });
    this.scale = element("div", { class: "scale" });
    this.box = element("div", {
      class: "tokens text",
      tabindex: "0",
      role: "group",
      "aria-label": "Response. Arrow keys choose a token.",
      onkeydown: (event) => this.key(event),
      onmouseover: (event) => this.hover(event),
      onfocus: () => this.active < 0 && this.choose(0, false),
    });
    this.spans = sample.tokens.map((text, i) => this.token(text, i));
    this.parts = partsOf(sample);
    this.box.append(...this.parts.map((part) => partNode(sample, part, this.spans)));
    this.node = element("article", { class: "card sample" }, heading, this.summary(), ...episodeSummary(sample), this.prompt(), this.scale, this.box, this.facts);
    this.paint();
    this.facts.textContent = "Point at a token, or focus the response and use the arrow keys.";
  }

  token(text, i) {
    const empty = text === "" || text === undefined;
    const shown = empty ? "·" : text.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥\t");
    const node = element("span", { class: empty ? "token special" : "token", "data-i": String(i) }, shown);
    return node;
  }

  summary() {
    const { samples } = this.run;
    const i = this.index;
    const limit = this.sample.episode ? "ended by a limit" : "cut off by the length limit";
    const ends = { stop: "ended by itself", length: limit, failure: "failed" };
    const words = [
      `step ${samples.step[i]}`,
      `reward ${short(samples.score[i])}`,
      `${samples.length[i]} tokens`,
      ends[samples.finish_reason[i]],
      `${samples.data_source[i]}, prompt ${samples.uid[i]}, sample ${samples.sample[i]}`,
    ];
    const terms = Object.entries(this.sample.terms).map(([name, value]) => `${name} ${short(value)}`);
    if (terms.length > 1) words.push(terms.join(", "));
    const versions = versionsOf(this.sample, { begin: 0, end: this.spans.length });
    if (versions.length > 1) words.push(...versionWords(versions));
    if (this.sample.answer !== null) words.push(`reference answer: ${this.sample.answer}`);
    return element("p", { class: "faint" }, words.join(" · "));
  }

  prompt() {
    const text = element("div", { class: "prompt text", tabindex: "0", "aria-label": "Prompt" }, this.sample.prompt);
    return element("div", {}, element("h3", {}, "Prompt"), text, element("h3", {}, "Response"));
  }

  trains(i) {
    const mask = this.sample.numbers["loss mask"];
    return !mask || mask[i] > 0.5;
  }

  partOf(i) {
    return this.parts.find((part) => i < part.end);
  }

  // Whether the quantity says something of the token.
  means(name, i) {
    return !this.partOf(i).told && (this.trains(i) || EVERYWHERE.has(name));
  }

  // Colour all tokens by the chosen quantity.
  paint() {
    const name = coloring.quantity;
    const numbers = this.sample.numbers[name];
    if (!numbers) {
      this.scale.replaceChildren(`No ${name} was measured for this sample.`);
      for (const span of this.spans) span.style.backgroundColor = "";
      return;
    }

    const center = name === "ratio after update" || name === "correction weight" ? 1 : 0;
    const sizes = [...numbers.filter((_, i) => this.means(name, i))].map((value) => Math.abs(value - center)).filter(Number.isFinite);
    const most = quantile(sizes.sort((a, b) => a - b), 0.98) || sizes[sizes.length - 1] || 0;
    this.spans.forEach((span, i) => {
      const value = this.means(name, i) ? numbers[i] - center : 0;
      const strength = most > 0 ? Math.min(1, Math.abs(value) / most) * 0.75 : 0;
      const color = value < 0 ? "209 73 41" : "33 118 207";
      span.style.backgroundColor = strength > 0.005 ? `rgb(${color} / ${strength.toFixed(3)})` : "";
      span.classList.toggle("masked", !this.trains(i) && !this.partOf(i).told);
    });
    this.scale.replaceChildren(short(center - most), element("span", { class: "ramp" }), short(center + most), ` ${name}`);
  }

  // Who wrote a token, as far as the dump says so.
  origin(i) {
    const { told, turn } = this.partOf(i);
    if (told) return ["from a tool or the environment; "];
    const versions = versionWords(versionsOf(this.sample, { begin: i, end: i + 1 }));
    return [...(turn ? [`turn ${turn}`] : []), ...versions].map((words) => `${words}; `);
  }

  hover(event) {
    const span = event.target.closest(".token");
    if (span) this.choose(Number(span.dataset.i), false);
  }

  key(event) {
    const last = this.spans.length - 1;
    const at = this.active;
    const moves = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + 10, ArrowUp: at - 10, Home: 0, End: last };
    if (!(event.key in moves) || last < 0) return;
    this.choose(Math.min(last, Math.max(0, moves[event.key])), true);
    event.preventDefault();
  }

  choose(i, scroll) {
    if (i === this.active || !this.spans[i]) return;
    if (this.active >= 0) this.spans[this.active].classList.remove("active");
    this.active = i;
    this.spans[i].classList.add("active");
    if (scroll) this.spans[i].scrollIntoView({ block: "nearest" });

    const { tokens, ids, numbers } = this.sample;
    const facts = [
      element("strong", {}, JSON.stringify(tokens[i])),
      ` token ${i + 1} of ${tokens.length}, id ${ids[i]}; `,
      ...this.origin(i),
      this.trains(i) ? "trains" : "does not train",
      element("br"),
    ];
    const told = this.partOf(i).told;
    for (const [name, column] of Object.entries(numbers)) {
      if (name !== "loss mask" && !(told && !EVERYWHERE.has(name))) facts.push(element("span", { "data-name": name }, `${name} ${short(Number(column[i].toPrecision(4)))}`));
    }
    this.facts.replaceChildren(...facts);
  }
}
