// How full each tier is, and how much of it a lower tier has too.

import { byId, element, setText } from "./dom.js";
import { bytes, count, percent } from "./words.js";

const TIERS = ["device", "host", "disk"];

export class Gauges {
  constructor() {
    this.gauges = new Map();
    for (const tier of TIERS) {
      const clean = element("span", { class: "clean" });
      const dirty = element("span", { class: "dirty" });
      const text = element("p", { class: "muted" }, "unknown");
      const meter = element(
        "div",
        { class: `meter ${tier}`, role: "meter", "aria-label": tier, "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": 0 },
        clean,
        dirty,
      );
      byId("gauges").append(element("h4", {}, tier), meter, text);
      this.gauges.set(tier, { clean, dirty, meter, text });
    }
  }

  show(stats) {
    for (const tier of TIERS) {
      const held = stats.kv?.[tier];
      if (held) showTier(this.gauges.get(tier), held);
    }
  }
}

function showTier({ clean, dirty, meter, text }, held) {
  if (!held.cap_bytes) {
    setText(text, "off");
    meter.setAttribute("aria-valuetext", "off");
    return;
  }
  const known = held.clean_blocks + held.dirty_blocks;
  const dirtyShare = known ? held.dirty_blocks / known : 1;
  const used = Math.min(1, held.used_bytes / held.cap_bytes);
  clean.style.width = `${100 * used * (1 - dirtyShare)}%`;
  dirty.style.width = `${100 * used * dirtyShare}%`;
  const parts = [
    `${bytes(held.used_bytes)} of ${bytes(held.cap_bytes)} (${percent(used)})`,
    `${count(held.clean_blocks)} clean, ${count(held.dirty_blocks)} dirty`,
  ];
  if (held.leased_blocks) parts.push(`${count(held.leased_blocks)} in use`);
  if (held.evictions) {
    const waited = held.evictions_waited ? `, ${count(held.evictions_waited)} of them waited for` : "";
    parts.push(`${count(held.evictions)} evicted${waited}`);
  }
  setText(text, parts.join(" · "));
  meter.setAttribute("aria-valuenow", Math.round(100 * used));
  meter.setAttribute("aria-valuetext", parts.join(", "));
}
