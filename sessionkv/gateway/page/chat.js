// The conversation of the chosen session: its messages, the reply as it comes, a badge for each turn.

import { ask, events, tell } from "./api.js";
import { Badge } from "./badge.js";
import { alertOf, clearAlert } from "./dialogs.js";
import { byId, element, setText } from "./dom.js";
import { Spoken } from "./spoken.js";

const SHOWN = 100; // messages drawn at once
const REMEMBERED = 2000; // reports of turns kept for when a session is shown again

export class Chat {
  /** `actions`: forkAt(node), rewindTo(node), changed(name): a turn of the session ended. */
  constructor(actions) {
    this.actions = actions;
    this.name = null;
    this.messages = [];
    this.shown = SHOWN;
    this.reports = new Map(); // node -> cache report
    this.running = new Map(); // session -> {said, reply, controller}
    this.spoken = new Spoken(byId("spoken"));
    this.log = byId("log");
    this.scroll = byId("scroll");
    this.follows = true; // the end is seen, and is to be seen when something comes
    this.scroll.addEventListener("scroll", () => {
      const { scrollTop, scrollHeight, clientHeight } = this.scroll;
      this.follows = scrollHeight - scrollTop - clientHeight < 40;
    });
    new ResizeObserver(() => this.toEnd()).observe(this.scroll);
    byId("earlier").addEventListener("click", () => {
      this.shown += SHOWN;
      this.draw();
    });
  }

  /** Show a session's conversation; null for none. */
  async show(name) {
    this.name = name;
    this.shown = SHOWN;
    this.follows = true;
    await this.reload();
  }

  /** Ask for the messages again; what is streaming stays. */
  async reload() {
    const name = this.name;
    let found = [];
    if (name !== null) {
      const { session, messages } = await ask("history", { session: name });
      if (session.last_cache) this.remember(session.node, session.last_cache);
      found = messages;
    }
    if (name !== this.name) return; // another one was chosen meanwhile
    this.messages = found;
    this.draw();
  }

  draw() {
    const start = Math.max(0, this.messages.length - this.shown);
    const items = this.messages.slice(start).map((message, i) => {
      const next = this.messages[start + i + 1];
      return this.stored(message, next?.node ?? null);
    });
    const running = this.running.get(this.name);
    if (running) items.push(running.said, running.reply);
    this.log.replaceChildren(...items);
    byId("earlier").hidden = start === 0;
    byId("empty").hidden = items.length > 0;
    this.showRunning();
    this.toEnd();
  }

  toEnd() {
    if (this.follows) this.scroll.scrollTop = this.scroll.scrollHeight;
  }

  /** A message of the history; `next` is the turn of the one behind it. */
  stored(message, next) {
    const item = bubble(message.role, contentOf(message));
    if (next !== message.node && message.role === "assistant") {
      const report = this.reports.get(message.node);
      if (report) {
        const badge = new Badge();
        badge.finish(report.cache, report.completion, report.reason);
        item.append(badge.node);
      }
      item.append(this.turnActions(message.node, next === null));
    }
    return item;
  }

  turnActions(node, isLast) {
    const button = (text, does) =>
      element("button", { type: "button", class: "small", onclick: () => does(node) }, text);
    return element(
      "p",
      { class: "turn-actions" },
      button("Fork from here…", this.actions.forkAt),
      isLast ? null : button("Rewind to here", this.actions.rewindTo),
    );
  }

  /** Send a message to the shown session and stream the reply into it. */
  async send(text, sampling) {
    const name = this.name;
    const badge = new Badge();
    const reply = bubble("assistant", "");
    reply.classList.add("streaming");
    reply.setAttribute("aria-busy", "true");
    reply.append(badge.node);
    const words = reply.querySelector(".text");
    const controller = new AbortController();
    const turn = crypto.getRandomValues(new Uint32Array(4)).join("-");
    this.running.set(name, { said: bubble("user", text), reply, controller, turn, words });
    this.follows = true;
    this.draw();
    let problem = null;
    try {
      await this.stream({ session: name, text, sampling, turn }, controller.signal, words, badge);
      clearAlert();
    } catch (error) {
      problem = error;
    }
    this.running.delete(name);
    if (problem !== null) this.failed(name, text, problem);
    if (this.name === name) await this.reload().catch(alertOf);
    this.actions.changed(name);
  }

  async stream(body, signal, words, badge) {
    const isShown = () => this.name === body.session;
    let over = false;
    for await (const { name, value } of events("turn", { body, signal })) {
      if (name === "delta") {
        words.textContent += value.text;
        badge.add(value.tokens);
        if (isShown()) this.spoken.add(value.text);
      } else if (name === "restarted") {
        words.textContent = "";
      } else if (name === "done") {
        over = true;
        words.textContent = value.text;
        const { node, cache, completion_tokens: completion, finish_reason: reason } = value;
        this.remember(node, cache, { completion, reason });
        badge.finish(cache, completion, reason);
        if (isShown()) this.spoken.end(badge.text.textContent);
      }
      if (isShown()) this.toEnd();
    }
    if (!over) throw new Error("the connection ended before the reply did");
  }

  failed(name, text, error) {
    const stopped = error.name === "AbortError" || error.code === "turn_cancelled";
    if (this.name === name) {
      const message = byId("message");
      if (!message.value) message.value = text; // nothing of the turn was kept
      this.spoken.end(stopped ? "stopped; nothing of it was kept" : "");
      this.draw();
    }
    if (!stopped) alertOf(error);
  }

  /** End the shown session's turn: what it said so far is its reply; if nothing, it never was. */
  async stop() {
    const running = this.running.get(this.name);
    if (running === undefined) return;
    const said = running.words.textContent !== "";
    const { found } = said ? await tell("stop", { turn: running.turn }) : { found: false };
    if (!found) running.controller.abort();
  }

  /** Keep a turn's report; what only its own end told stays known. */
  remember(node, cache, end = {}) {
    const known = this.reports.get(node) ?? { completion: null, reason: null };
    this.reports.delete(node);
    this.reports.set(node, { ...known, ...end, cache });
    if (this.reports.size > REMEMBERED) this.reports.delete(this.reports.keys().next().value);
  }

  /** The cache report of a turn, null where it is not known. */
  reportOf(node) {
    return this.reports.get(node)?.cache ?? null;
  }

  /** What the last user message of the session said, for when it is taken back. */
  lastSaid() {
    const last = this.messages.findLast((message) => message.role === "user");
    return last ? contentOf(last) : "";
  }

  showRunning() {
    const runs = this.running.has(this.name);
    byId("stop").hidden = !runs;
    byId("send").disabled = runs;
  }
}

/** Make a session, or resume it. */
export const openSession = (name, system) =>
  tell("open", { session: name, system: system || null });

function bubble(role, text) {
  return element(
    "li",
    { class: `message ${["user", "assistant"].includes(role) ? role : "other"}` },
    element("p", { class: "role" }, role),
    element("p", { class: "text", dir: "auto" }, text),
  );
}

function contentOf(message) {
  const content = message.content;
  if (typeof content === "string") return content;
  if (Array.isArray(content)) return content.map((part) => part.text ?? "").join("");
  return message.tool_calls ? JSON.stringify(message.tool_calls, null, 2) : "";
}

/** The head of the pane: what is known of the session. */
export function showFacts(name, text) {
  setText(byId("chat-title"), name ?? "No session yet");
  setText(byId("chat-facts"), text);
  byId("chat-actions").hidden = name === null;
}
