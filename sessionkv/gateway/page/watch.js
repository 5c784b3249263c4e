// One stream of the engine's figures, and of the followed session, for as long as the page is seen.

import { events } from "./api.js";
import { byId, setText } from "./dom.js";

const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 10_000;

export class Watch {
  /** `listeners` by event: engine, stats, session. */
  constructor(listeners) {
    this.listeners = listeners;
    this.session = null;
    this.controller = null;
    this.waitMs = FIRST_WAIT_MS;
    document.addEventListener("visibilitychange", () => {
      if (document.hidden) this.controller?.abort();
      else this.begin();
    });
  }

  /** Be told of this session from now on; null for none. */
  follow(session) {
    this.session = session;
    this.begin();
  }

  begin() {
    this.controller?.abort();
    this.controller = new AbortController();
    this.listen(this.controller.signal);
  }

  async listen(signal) {
    while (!signal.aborted) {
      try {
        for await (const { name, value } of events("events", { query: { session: this.session }, signal })) {
          if (signal.aborted) return;
          this.waitMs = FIRST_WAIT_MS;
          state("live", "connected");
          this.listeners[name]?.(value);
        }
      } catch (error) {
        if (signal.aborted) return;
        if (error.status === 401) {
          state("lost", "a key is needed");
          return;
        }
      }
      state("lost", "no connection; trying again");
      await new Promise((resolve) => setTimeout(resolve, this.waitMs));
      this.waitMs = Math.min(2 * this.waitMs, LONGEST_WAIT_MS);
    }
  }
}

function state(name, text) {
  const node = byId("connection");
  node.dataset.state = name;
  setText(node, text);
}
