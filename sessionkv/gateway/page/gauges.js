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
      const held = stats.kv?.[tier] ?? ofQuota(stats.quota?.[tier]);
      if (held) showTier(this.gauges.get(tier), held);
      else setText(this.gauges.get(tier).text, "only an operator's key sees it");
    }
  }
}

/** What a tenant sees of a tier: its own part, where it has a quota. */
function ofQuota(quota) {
  if (!quota) return null;
  return { used_bytes: quota.retained_bytes, cap_bytes: quota.quota_bytes, past_bytes: quota.past_bytes };
}

function showTier({ clean, dirty, meter, text }, held) {
  if (!held.cap_bytes) {
    setText(text, "off");
    meter.setAttribute("aria-valuetext", "off");
    return;
  }
  const isQuota = held.past_bytes !== undefined;
  const known = isQuota ? 0 : held.clean_blocks + held.dirty_blocks;
  const dirtyShare = known ? held.dirty_blocks / known : isQuota ? 0 : 1;
  const used = Math.min(1, held.used_bytes / held.cap_bytes);
  clean.style.width = `${100 * used * (1 - dirtyShare)}%`;
  dirty.style.width = `${100 * used * dirtyShare}%`;
  const parts = [
    `${bytes(held.used_bytes)} of ${bytes(held.cap_bytes)} (${percent(used)})`,
    isQuota
      ? `your quota; ${bytes(held.past_bytes)} past it`
      : `${count(held.clean_blocks)} clean, ${count(held.dirty_blocks)} dirty`,
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
