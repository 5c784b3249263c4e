// What a screen reader is told of a reply as it comes: whole sentences, not single tokens.

import { element } from "./dom.js";

const LONGEST = 240;
const KEPT = 40;

export class Spoken {
  /** `node` is a live region that announces what is added. */
  constructor(node) {
    this.node = node;
    this.waiting = "";
  }

  add(text) {
    this.waiting += text;
    const end = Math.max(
      this.waiting.lastIndexOf(". "),
      this.waiting.lastIndexOf("\n"),
      this.waiting.lastIndexOf("? "),
      this.waiting.lastIndexOf("! "),
    );
    if (end >= 0) this.say(end + 1);
    else if (this.waiting.length > LONGEST) this.say(this.waiting.length);
  }

  /** The rest of the reply, and what is to be known of it. */
  end(text) {
    this.say(this.waiting.length);
    this.waiting = text;
    this.say(text.length);
  }

  say(length) {
    const text = this.waiting.slice(0, length).trim();
    this.waiting = this.waiting.slice(length);
    if (text) this.node.append(element("p", {}, text));
    while (this.node.childElementCount > KEPT) this.node.firstElementChild.remove();
  }
}
