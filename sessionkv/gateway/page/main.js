// Puts the parts together: what is chosen, what is done, and what the engine tells.

import { ApiError, ask, onKeyNeeded, tell } from "./api.js";
import { Charts } from "./charts.js";
import { Chat, openSession, showFacts } from "./chat.js";
import { alertOf, clearAlert, openDialog, prepareDialogs } from "./dialogs.js";
import { byId, setText } from "./dom.js";
import { Gauges } from "./gauges.js";
import { showMiss } from "./miss.js";
import { Places } from "./places.js";
import { Tree } from "./tree.js";
import { Watch } from "./watch.js";
import { count, counted } from "./words.js";

const PAGE = 100; // sessions asked for at once

class Page {
  constructor() {
    this.selected = null;
    this.listing = { sessions: [], nodes: [], next: null };
    this.places = new Places();
    this.gauges = new Gauges();
    this.charts = new Charts();
    this.tree = new Tree({
      select: (name) => this.act(() => this.select(name)),
      fork: (name, node) => this.act(() => this.fork(name, node)),
      rewind: (name, turns) => this.act(() => this.rewind(name, turns)),
      pin: (name) => this.act(() => this.pin(name)),
      unpin: (name) => this.act(() => this.unpin(name)),
      close: (name) => this.act(() => this.close(name)),
    });
    this.chat = new Chat({
      forkAt: (node) => this.act(() => this.fork(this.selected, node)),
      rewindTo: (node) => this.act(() => this.rewindTo(node)),
      changed: () => this.refresh(),
    });
    this.watch = new Watch({
      stats: (stats) => this.onStats(stats),
      session: (told) => this.onSession(told),
      engine: ({ model, max_model_len: window }) =>
        setText(byId("model"), `${model} · window ${count(window)} tokens`),
    });
    this.counted = null;
    this.listTimer = null;
  }

  /** Do something that may fail; what fails is told. */
  async act(does) {
    try {
      await does();
      clearAlert();
    } catch (error) {
      alertOf(error);
    }
  }

  /** Ask for the list in the background: nobody waits, and what is told of stays told. */
  async refresh() {
    try {
      await this.list();
    } catch (error) {
      if (error instanceof ApiError) alertOf(error); // else there is no connection, which is shown
    }
  }

  // What the engine tells ---------------------------------------------------------------------

  onStats(stats) {
    this.gauges.show(stats);
    this.charts.add(stats);
    const finished = Object.values(stats.requests_finished).reduce((a, b) => a + b, 0);
    const counts = `${stats.sessions} ${finished}`;
    // Others use the engine too: the list is asked for again, seldom, when something happened.
    if (this.counted !== null && counts !== this.counted) this.listSoon();
    this.counted = counts;
  }

  onSession({ name, session, places }) {
    if (name !== this.selected) return;
    this.places.show(name, places);
    if (session?.last_cache) this.chat.remember(session.node, session.last_cache);
    showMiss(session && this.chat.reportOf(session.node));
    this.showSession(session);
  }

  showSession(session) {
    if (session === null) {
      showFacts(this.selected, this.selected === null ? "" : "there is no such session");
      return;
    }
    const facts = [counted(session.turns, "turn"), `${count(session.tokens)} tokens`];
    if (session.pin) {
      const end = session.pin.expires_s;
      const until = end === null ? "" : ` until ${new Date(end * 1000).toLocaleTimeString()}`;
      facts.push(`pinned in ${session.pin.tier}${until}, priority ${session.pin.priority}`);
    }
    if (session.queued) facts.push(counted(session.queued, "turn waits", "turns wait"));
    showFacts(session.name, facts.join(" · "));
    const hide = (action, hidden) => {
      document.querySelector(`#chat-actions [data-action=${action}]`).hidden = hidden;
    };
    hide("unpin", !session.pin);
    hide("pin", Boolean(session.pin));
    hide("rewind", session.turns === 0);
  }

  // Sessions ----------------------------------------------------------------------------------

  /** Ask for the list again, with as many pages as are shown. */
  async list() {
    clearTimeout(this.listTimer);
    this.listTimer = null;
    const wanted = Math.max(PAGE, this.listing.sessions.length);
    let listing = await this.pageAfter(null);
    while (listing.next !== null && listing.sessions.length < wanted) {
      listing = joined(listing, await this.pageAfter(listing.next));
    }
    this.showListing(await this.withSelected(listing));
  }

  /** The listing, and the chosen session where it is on a later page. */
  async withSelected(listing) {
    const name = this.selected;
    if (name === null || listing.next === null) return listing;
    if (listing.sessions.some((session) => session.name === name)) return listing;
    try {
      return { ...joined(listing, await ask("tree", { session: name })), next: listing.next };
    } catch (error) {
      if (error.code !== "session_not_found") throw error;
      return listing;
    }
  }

  listSoon() {
    this.listTimer ??= setTimeout(() => this.refresh(), 1000);
  }

  pageAfter(after) {
    return ask("tree", { prefix: byId("prefix").value, after, limit: PAGE });
  }

  async listMore() {
    this.showListing(joined(this.listing, await this.pageAfter(this.listing.next)));
  }

  showListing(listing) {
    this.listing = listing;
    this.tree.show(listing, this.selected);
    byId("more").hidden = listing.next === null;
  }

  async select(name) {
    this.selected = name;
    this.tree.show(this.listing, name);
    this.tree.reveal();
    this.places.show(name, undefined);
    showMiss(null);
    showFacts(name, "");
    this.watch.follow(name);
    if (name !== null) showView("chat");
    await this.chat.show(name);
  }

  async create() {
    const given = await openDialog("new-dialog", { values: { name: freshName() } });
    if (given === null) return;
    await openSession(given.name, given.system);
    await this.list();
    await this.select(given.name);
    byId("message").focus();
  }

  // What is done to a session -----------------------------------------------------------------

  async fork(name, node = null) {
    const given = await openDialog("fork-dialog", {
      values: { name: `${name.slice(0, 200)} (fork)` },
      texts: { what: `From ${node === null ? "the last turn" : node} of ${name}. It takes no memory.` },
    });
    if (given === null) return;
    await tell("fork", { session: name, name: given.name, node });
    await this.list();
    await this.select(given.name);
    byId("message").focus();
  }

  async rewind(name, turns) {
    const said = name === this.selected && turns === 1 ? this.chat.lastSaid() : "";
    await tell("rewind", { session: name, turns });
    await this.list();
    if (name !== this.selected) return;
    await this.chat.reload();
    const message = byId("message");
    if (said && !message.value) message.value = said; // to be edited and said again
    message.focus();
  }

  async rewindTo(node) {
    const nodes = [...new Set(this.chat.messages.map((message) => message.node))];
    const turns = nodes.length - 1 - nodes.indexOf(node);
    if (turns > 0) await this.rewind(this.selected, turns);
  }

  async pin(name) {
    const given = await openDialog("pin-dialog");
    if (given === null) return;
    await tell("pin", {
      session: name,
      tier: given.tier,
      ttl_s: given.minutes ? Number(given.minutes) * 60 : null,
      priority: Number(given.priority),
    });
    await this.list();
  }

  async unpin(name) {
    await tell("unpin", { session: name });
    await this.list();
  }

  async close(name) {
    const given = await openDialog("close-dialog", { texts: { what: name } });
    if (given === null) return;
    await tell("close", { session: name, keep: given.action === "keep" });
    await this.list();
    if (given.action === "delete" && name === this.selected) await this.select(null);
  }

  async send() {
    const message = byId("message");
    const text = message.value;
    if (!text.trim() || byId("send").disabled) return;
    message.value = "";
    if (this.selected === null) {
      const name = freshName();
      await openSession(name, "");
      await this.list();
      await this.select(name);
    }
    await this.chat.send(text, samplingGiven());
  }

  // The start ---------------------------------------------------------------------------------

  begin() {
    prepareDialogs();
    onKeyNeeded(async (why) => {
      const given = await openDialog("key-dialog", { texts: { what: why } });
      return given === null ? null : given.key;
    });
    const on = (id, event, does) => byId(id).addEventListener(event, does);
    on("new-session", "click", () => this.act(() => this.create()));
    on("more", "click", () => this.act(() => this.listMore()));
    on("prefix", "input", () => this.listSoon());
    on("stop", "click", () => this.act(() => this.chat.stop()));
    on("composer", "submit", (event) => {
      event.preventDefault();
      this.act(() => this.send());
    });
    on("message", "keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.act(() => this.send());
    });
    for (const button of document.querySelectorAll("#chat-actions button")) {
      const act = {
        fork: () => this.fork(this.selected),
        rewind: () => this.rewind(this.selected, 1),
        pin: () => this.pin(this.selected),
        unpin: () => this.unpin(this.selected),
        close: () => this.close(this.selected),
      }[button.dataset.action];
      button.addEventListener("click", () => this.act(act));
    }
    for (const button of document.querySelectorAll(".views button")) {
      button.addEventListener("click", () => showView(button.dataset.view));
    }
    this.watch.follow(null);
    this.refresh();
  }
}

function joined(listing, more) {
  const known = new Set(listing.nodes.map((node) => node.node));
  const names = new Set(listing.sessions.map((session) => session.name));
  return {
    sessions: [...listing.sessions, ...more.sessions.filter(({ name }) => !names.has(name))],
    nodes: [...listing.nodes, ...more.nodes.filter((node) => !known.has(node.node))],
    next: more.next,
  };
}

function freshName() {
  const now = new Date();
  const two = (value) => String(value).padStart(2, "0");
  const day = `${now.getFullYear()}-${two(now.getMonth() + 1)}-${two(now.getDate())}`;
  return `chat ${day} ${two(now.getHours())}:${two(now.getMinutes())}:${two(now.getSeconds())}`;
}

function samplingGiven() {
  const sampling = {};
  const temperature = byId("temperature").value;
  const most = byId("max-tokens").value;
  if (temperature) sampling.temperature = Number(temperature);
  if (most) sampling.max_tokens = Number(most);
  return sampling;
}

/** On a narrow screen one part is seen at a time. */
function showView(view) {
  document.body.dataset.view = view;
  for (const button of document.querySelectorAll(".views button")) {
    button.setAttribute("aria-pressed", String(button.dataset.view === view));
  }
}

new Page().begin();
