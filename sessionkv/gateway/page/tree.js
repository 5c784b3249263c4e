// The sessions as trees of turns: rows are sessions, dots are turns, lines are forks.

import { byId, element, setText, shape } from "./dom.js";
import { treesOf } from "./tree_layout.js";
import { count, counted } from "./words.js";

const STEP = 18; // from one turn to the next
const ROW = 54; // from one session to the next
const RAIL = 40; // middle of the dots in a row
const MOST_INDENT = 90;

export class Tree {
  /** `actions`: select(name), and what is done at a turn: see `panel`. */
  constructor(actions) {
    this.actions = actions;
    this.selected = null;
    this.place = null; // {session, node}: the turn whose panel is open
    this.trees = [];
    this.drawnOf = "";
    this.node = byId("trees");
    this.node.addEventListener("keydown", (event) => this.onKey(event));
  }

  /** Draw a listing anew; what had the focus keeps it. */
  show(listing, selected) {
    const drawn = JSON.stringify([listing, selected]);
    if (drawn === this.drawnOf) return; // somebody may be about to click
    this.drawnOf = drawn;
    this.trees = treesOf(listing);
    this.selected = selected;
    if (!listing.sessions.some((session) => session.name === this.place?.session)) this.place = null;
    const focus = document.activeElement?.dataset?.key;
    this.node.replaceChildren(...this.trees.map((tree) => this.drawn(tree)));
    if (focus) this.focusOn(focus);
    const more = listing.next === null ? "" : " so far";
    setText(byId("tree-status"), `${counted(listing.sessions.length, "session")}${more}`);
  }

  /** Scroll to the chosen session. */
  reveal() {
    this.node.querySelector(".row.chosen")?.scrollIntoView({ block: "nearest" });
  }

  focusOn(key) {
    [...this.node.querySelectorAll("[data-key]")].find((node) => node.dataset.key === key)?.focus();
  }

  drawn(tree) {
    const height = tree.rows.length * ROW;
    const width = STEP * (2 + Math.max(...tree.rows.map((row) => endOf(row))));
    const lines = shape("svg", { class: "lines", width, height, "aria-hidden": "true" });
    const at = new Map(tree.rows.map((row, i) => [row, i * ROW + RAIL]));
    for (const row of tree.rows) lines.append(...linesOf(row, at));
    const rows = tree.rows.map((row) => this.row(row));
    const rail = element("div", { class: "tree-rail" }, lines, element("ul", {}, ...rows));
    rail.style.minWidth = `${width}px`;
    const panel = tree.rows.some((row) => row.session.name === this.place?.session);
    return element("div", { class: "tree" }, rail, panel ? this.panel(tree) : null);
  }

  row(row) {
    const { session, turns } = row;
    const chosen = session.name === this.selected;
    const facts = [counted(session.turns, "turn"), `${count(session.tokens)} tokens`];
    if (session.pin) facts.unshift(`pinned in ${session.pin.tier}`);
    if (session.running) facts.unshift("running");
    const name = element(
      "button",
      {
        type: "button", class: "session", dir: "auto", title: session.name,
        "data-key": `session ${session.name}`, "aria-current": chosen ? "true" : null,
        onclick: () => this.actions.select(session.name),
      },
      session.name,
    );
    const dots = turns.map((turn) => this.dot(row, turn));
    if (!turns.length && row.from) dots.push(this.dot(row, row.from.turn));
    const rail = element("div", { class: "dots", role: "group", "aria-label": `Turns of ${session.name}` }, ...dots);
    return element(
      "li",
      { class: chosen ? "row chosen" : "row" },
      indented(row, name, element("span", { class: "muted facts" }, facts.join(" · "))),
      rail,
    );
  }

  dot(row, turn) {
    const { session } = row;
    const isHead = turn.node === session.node;
    const what = turn.turn === 0 ? "Start" : `Turn ${turn.turn}`;
    const key = `turn ${session.name} ${turn.node}`;
    const dot = element("button", {
      type: "button", class: isHead ? "dot head" : "dot", "data-key": key,
      "aria-label": `${what} of ${session.name}${isHead ? ", where it stands" : ""}`,
      "aria-expanded": this.place?.session === session.name && this.place.node === turn.node ? "true" : "false",
      title: `${what} · ${turn.node}`,
      tabindex: isHead ? 0 : -1, // one stop a row; arrows reach the others
      onclick: () => this.open(session.name, turn.node),
    });
    dot.style.left = `${xOf(turn)}px`;
    return dot;
  }

  /** Open or close the panel of a turn. */
  open(session, node) {
    const same = this.place?.session === session && this.place.node === node;
    this.place = same ? null : { session, node };
    this.redraw();
    if (!same) this.node.querySelector(".panel button")?.focus();
    else this.focusOn(`turn ${session} ${node}`);
  }

  redraw() {
    this.node.replaceChildren(...this.trees.map((tree) => this.drawn(tree)));
  }

  panel(tree) {
    const { session: name, node } = this.place;
    const row = tree.rows.find((candidate) => candidate.session.name === name);
    const turn = [...row.turns, row.from?.turn].find((candidate) => candidate?.node === node);
    const { session } = row;
    if (turn === undefined) return null;
    const { actions } = this;
    const back = session.turns - turn.turn;
    const button = (text, does) => element("button", { type: "button", class: "small", onclick: does }, text);
    return element(
      "div",
      { class: "panel", role: "group", "aria-label": `Turn ${turn.turn} of ${name}` },
      element("p", { dir: "auto" }, turn.turn === 0 ? `Start of ${name}` : `Turn ${turn.turn} of ${name} (${node})`),
      button("Fork from here…", () => actions.fork(name, node)),
      back > 0 ? button(`Rewind ${counted(back, "turn")}`, () => actions.rewind(name, back)) : null,
      session.pin ? button("Unpin", () => actions.unpin(name)) : button("Pin…", () => actions.pin(name)),
      button("Close…", () => actions.close(name)),
    );
  }

  onKey(event) {
    if (event.key === "Escape" && this.place) {
      const { session, node } = this.place;
      this.open(session, node);
      return;
    }
    const dot = event.target.closest?.(".dot");
    if (!dot) return;
    const to = neighbour(this.node, dot, event.key);
    if (to) {
      event.preventDefault();
      to.focus();
    }
  }
}

/** What stands above a row's dots, beginning where the row does, but seen whole. */
function indented(row, ...parts) {
  const head = element("div", { class: "row-head" }, ...parts);
  if (row.from) head.style.setProperty("--indent", `${Math.min(xOf(row.from.turn), MOST_INDENT)}px`);
  return head;
}

const xOf = (turn) => STEP * (turn.turn + 1);

function endOf(row) {
  return (row.turns.at(-1) ?? row.from?.turn ?? { turn: 0 }).turn;
}

function linesOf(row, at) {
  const y = at.get(row);
  const lines = [];
  const [first] = row.turns;
  if (first) lines.push(`M${xOf(first)} ${y}H${xOf(row.turns.at(-1))}`);
  if (row.from) {
    const x = xOf(row.from.turn);
    lines.push(`M${x} ${at.get(row.from.row)}V${first ? `${y - 8}Q${x} ${y} ${x + 8} ${y}H${xOf(first)}` : y}`);
  }
  return lines.map((d) => shape("path", { d }));
}

/** The dot that an arrow key leads to. */
function neighbour(root, dot, key) {
  const row = dot.closest(".row");
  const dots = [...row.querySelectorAll(".dot")];
  const rows = [...root.querySelectorAll(".row")];
  if (key === "ArrowLeft") return dots[dots.indexOf(dot) - 1];
  if (key === "ArrowRight") return dots[dots.indexOf(dot) + 1];
  if (key !== "ArrowUp" && key !== "ArrowDown") return null;
  const other = rows[rows.indexOf(row) + (key === "ArrowUp" ? -1 : 1)];
  const x = dot.offsetLeft;
  const near = [...(other?.querySelectorAll(".dot") ?? [])];
  return near.sort((a, b) => Math.abs(a.offsetLeft - x) - Math.abs(b.offsetLeft - x))[0];
}
