// Small charts of the last minutes, made of the differences between the engine's counters.

import { byId, element, setText, shape } from "./dom.js";
import { milliseconds, percent, rate } from "./words.js";

const WINDOW_S = 300;
const LEAST_WINDOW_S = 60;
const WIDTH = 300;
const HEIGHT = 60;

export class Charts {
  constructor() {
    this.before = null;
    this.hit = new Chart("Hit rate", percent, () => 1);
    this.ttft = new Chart("Time to first token", milliseconds, niceMost);
    this.speed = new Chart("Generated", rate, niceMost);
  }

  /** Take in the engine's figures as of now. */
  add(stats, seconds = performance.now() / 1000) {
    if (!stats.latency?.ttft) return;
    const now = countersOf(stats);
    const before = this.before;
    this.before = { ...now, seconds };
    if (before === null || now.prompts < before.prompts) return; // the first ones, or a new engine
    const prompts = now.prompts - before.prompts;
    const turns = now.turns - before.turns;
    const took = seconds - before.seconds;
    this.hit.add(seconds, prompts ? (now.hits - before.hits) / prompts : null);
    this.ttft.add(seconds, turns ? (now.ttft - before.ttft) / turns : null);
    this.speed.add(seconds, took > 0 ? (now.generated - before.generated) / took : null);
  }
}

function countersOf(stats) {
  const { count, mean_ms: mean } = stats.latency.ttft;
  return {
    prompts: stats.prefix_cache.queries_tokens,
    hits: stats.prefix_cache.hits_tokens,
    turns: count,
    ttft: count * mean,
    generated: stats.generation_tokens,
  };
}

class Chart {
  constructor(title, inWords, mostOf) {
    this.inWords = inWords;
    this.mostOf = mostOf;
    this.points = [];
    this.now = element("span", { class: "chart-now" }, "nothing yet");
    this.most = element("span", { class: "chart-most muted" }, "");
    this.past = element("span", { class: "chart-past muted" }, "");
    this.line = shape("path", { class: "chart-line" });
    this.dots = shape("g", { class: "chart-dots" });
    const picture = shape(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
      shape("path", { class: "chart-axis", d: `M0 ${HEIGHT - 0.5}H${WIDTH}M0 0.5H${WIDTH}` }),
      this.line,
      this.dots,
    );
    byId("charts").append(
      element(
        "figure",
        { class: "chart" },
        element("figcaption", {}, `${title}: `, this.now),
        element("div", { class: "chart-frame" }, picture, this.most, this.past),
      ),
    );
  }

  add(seconds, value) {
    if (value !== null) {
      this.points.push({ seconds, value });
      setText(this.now, this.inWords(value));
    }
    while (this.points.length && this.points[0].seconds < seconds - WINDOW_S) this.points.shift();
    if (!this.points.length) return;
    const [{ seconds: first }] = this.points;
    const span = Math.max(LEAST_WINDOW_S, seconds - first);
    setText(this.past, `${Math.round(span)} s ago`);
    const most = this.mostOf(Math.max(...this.points.map((point) => point.value)));
    const at = this.points.map((point) => ({
      x: WIDTH - ((seconds - point.seconds) / span) * WIDTH,
      y: HEIGHT - 2 - (point.value / most) * (HEIGHT - 4),
    }));
    this.line.setAttribute("d", at.map(({ x, y }, i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join(""));
    const last = at.at(-1);
    this.dots.replaceChildren(shape("circle", { cx: last.x.toFixed(1), cy: last.y.toFixed(1), r: 2.5 }));
    setText(this.most, this.inWords(most));
  }
}

/** The next of 1, 2 and 5 times a power of ten. */
export function niceMost(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= value * 0.9999);
}
