// What a turn cost, beside its reply: while it runs as this page sees it, then as the engine says.

import { element } from "./dom.js";
import { count, milliseconds, missInShort, rate } from "./words.js";

const SOURCES = ["device", "host", "disk", "computed"];

export class Badge {
  constructor() {
    this.bar = element("span", { class: "bar", "aria-hidden": "true" });
    this.text = element("span", { class: "badge-text" }, "waiting");
    this.node = element("p", { class: "badge" }, this.bar, this.text);
    this.began = performance.now();
    this.first = null;
    this.tokens = 0;
  }

  /** Tokens came. */
  add(tokens) {
    this.first ??= performance.now();
    this.tokens += tokens;
    const seconds = (performance.now() - this.first) / 1000;
    const parts = [
      `first token after ${milliseconds(this.first - this.began)}`,
      `${count(this.tokens)} tokens`,
    ];
    if (seconds > 0.2) parts.push(rate((this.tokens - 1) / seconds));
    this.text.textContent = parts.join(" · ");
  }

  /** The engine's report; `completion` is how many tokens the reply has, `reason` why it ended. */
  finish(cache, completion = null, reason = null) {
    this.node.classList.add("final");
    this.bar.replaceChildren(
      ...SOURCES.filter((source) => tokensFrom(cache, source)).map((source) => {
        const part = element("span", { class: `part ${source}` });
        part.style.flexGrow = tokensFrom(cache, source);
        return part;
      }),
    );
    this.text.textContent = cacheInWords(cache, completion, reason);
  }

  /** It ended without a report. */
  fail(text) {
    this.node.classList.add("final");
    this.text.textContent = text;
  }
}

const tokensFrom = (cache, source) => cache[`${source}_tokens`];

const ENDS = { length: "cut off at its limit", cancelled: "stopped" };

function cacheInWords(cache, completion, reason) {
  const parts = [
    `prompt ${count(cache.prompt_tokens)}: ` +
      SOURCES.map((source) => `${count(tokensFrom(cache, source))} ${source}`).join(" + "),
    `first token ${milliseconds(cache.ttft_ms)}`,
  ];
  if (cache.decode_tokens_per_s) parts.push(rate(cache.decode_tokens_per_s));
  if (completion !== null) parts.push(`${count(completion)} generated`);
  if (cache.recomputed_tokens) parts.push(`${count(cache.recomputed_tokens)} computed again`);
  if (reason in ENDS) parts.push(ENDS[reason]);
  parts.push(missInShort(cache.miss));
  return parts.join(" · ");
}
