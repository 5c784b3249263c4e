// A session's blocks as columns, from the start of its log on, each in the lane of its tier. A block
// that is spilled sinks to a lower lane, and one that is fetched rises again.

import { byId, element, setText, shape } from "./dom.js";
import { bytes, count, counted, PLACES } from "./words.js";

const COLUMNS = 128;
const LANE = 10;

export class Places {
  constructor() {
    this.lanes = byId("lanes");
    this.columns = [];
    this.counts = new Map();
    this.picture = shape("svg", { "aria-hidden": "true", preserveAspectRatio: "none" });
    const labels = element("ul", { class: "lane-labels" });
    for (const place of PLACES) {
      const number = element("span", { class: "lane-count" }, "0");
      this.counts.set(place, number);
      labels.append(element("li", { class: place }, `${place} `, number));
    }
    this.lanes.append(labels, this.picture);
  }

  /** Draw what the engine told; null where there is no such session, undefined before it told. */
  show(name, places) {
    const counts = places?.counts ?? {};
    for (const place of PLACES) setText(this.counts.get(place), count(counts[place] ?? 0));
    const blocks = places?.blocks ?? 0;
    this.draw(blocks ? columnsOf(places) : []);
    setText(byId("places-text"), name === null ? "No session is chosen." : inWords(places));
  }

  draw(places) {
    if (places.length !== this.columns.length) {
      const width = Math.max(places.length, 16);
      this.picture.setAttribute("viewBox", `0 0 ${width} ${LANE * PLACES.length}`);
      this.columns = places.map((_, i) =>
        shape("rect", { x: i + 0.08, y: 1, width: 0.84, height: LANE - 2 }),
      );
      this.picture.replaceChildren(...this.columns);
    }
    places.forEach((place, i) => {
      this.columns[i].setAttribute("class", `block ${place}`);
      this.columns[i].style.transform = `translateY(${LANE * PLACES.indexOf(place)}px)`;
    });
  }
}

/** One place for each column: where the most of its blocks are. */
export function columnsOf({ blocks, runs }) {
  const columns = Math.min(blocks, COLUMNS);
  const counts = Array.from({ length: columns }, () => new Map());
  let at = 0;
  for (const [place, length] of runs) {
    const end = at + length;
    while (at < end) {
      const column = Math.floor((at * columns) / blocks);
      const next = Math.min(end, Math.ceil(((column + 1) * blocks) / columns));
      counts[column].set(place, (counts[column].get(place) ?? 0) + next - at);
      at = next;
    }
  }
  return counts.map((found) => [...found].reduce((a, b) => (b[1] > a[1] ? b : a))[0]);
}

function inWords(places) {
  if (places === undefined) return "The engine is asked.";
  if (places === null) return "There is no such session any more.";
  if (!places.blocks) return "It has no blocks yet.";
  const where = PLACES.filter((place) => places.counts[place])
    .map((place) => `${count(places.counts[place])} ${place === "nowhere" ? "nowhere, to be computed again" : `in ${place}`}`)
    .join(", ");
  const size = bytes(places.blocks * places.block_bytes);
  return `${counted(places.blocks, "block")} of ${places.block_tokens} tokens, ${size}: ${where}.`
    .replace("in disk", "on disk")
    .replace("in device", "on the device")
    .replace("in host", "in host memory");
}
