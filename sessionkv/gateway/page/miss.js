// Why the last turn computed what had been computed before, in words.

import { byId, element } from "./dom.js";
import { count, counted, reasonInWords } from "./words.js";

/** Explain a cache report; null where none is known. */
export function showMiss(cache) {
  byId("miss").replaceChildren(...(cache === null ? [none()] : explained(cache)));
}

const none = () => element("p", { class: "muted" }, "Nothing to tell yet.");

function explained(cache) {
  const { miss } = cache;
  const [why, help] = reasonInWords(miss.reason);
  const parts = [element("p", { class: "miss-why" }, why)];
  if (miss.token !== null && !["none", "first_turn"].includes(miss.reason)) {
    let where = `From token ${count(miss.token)} on`;
    if (miss.turn !== null) where += `, in turn ${count(miss.turn)}`;
    if (miss.part === "tools") where += ", in the tools";
    else if (miss.part === "system") where += ", in the system prompt";
    else if (miss.message !== null) where += `, message ${count(miss.message)}`;
    parts.push(element("p", {}, `${where}.`));
  }
  if (miss.expected !== null || miss.found !== null) {
    parts.push(
      element(
        "dl",
        {},
        element("dt", {}, "the history has"),
        element("dd", { dir: "auto" }, miss.expected ?? "nothing"),
        element("dt", {}, "the request had"),
        element("dd", { dir: "auto" }, miss.found ?? "nothing"),
      ),
    );
  }
  const counts = Object.entries(cache.miss_tokens).filter(([, tokens]) => tokens);
  if (counts.length) {
    const items = counts.map(([reason, tokens]) =>
      element("li", {}, `${counted(tokens, "token")}: ${reason.replaceAll("_", " ")}`),
    );
    parts.push(element("ul", {}, ...items));
  }
  if (help) parts.push(element("p", { class: "muted" }, help));
  return parts;
}
