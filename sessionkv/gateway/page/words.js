// Numbers, sizes and reasons as people read them.

const NUMBERS = new Intl.NumberFormat("en");
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export const PLACES = ["device", "host", "disk", "nowhere"];

export const count = (value) => NUMBERS.format(value);

export function counted(value, one, many = `${one}s`) {
  return `${count(value)} ${value === 1 ? one : many}`;
}

export function bytes(value) {
  let unit = 0;
  let left = value;
  while (left >= 1024 && unit < UNITS.length - 1) {
    left /= 1024;
    unit += 1;
  }
  return `${left >= 100 || unit === 0 ? Math.round(left) : left.toFixed(1)} ${UNITS[unit]}`;
}

export function milliseconds(value) {
  if (value >= 10_000) return `${(value / 1000).toFixed(1)} s`;
  if (value >= 1000) return `${(value / 1000).toFixed(2)} s`;
  return `${value >= 10 ? Math.round(value) : value.toFixed(1)} ms`;
}

export const percent = (share) => `${Math.round(share * 100)}%`;

export const rate = (value) => `${value >= 100 ? count(Math.round(value)) : value.toFixed(1)} tokens/s`;

const REASONS = {
  none: ["Nothing that was known was computed again.", ""],
  first_turn: ["There was no history yet.", ""],
  evicted: ["Its blocks had to make room for others.", "A larger tier or a pin keeps them."],
  expired: ["Its blocks left after their pin had run out.", "A longer pin keeps them."],
  not_stored: [
    "Its blocks never reached a tier that survived.",
    "A flush, or durability idle or turn, writes them in time.",
  ],
  not_matched: [
    "Its blocks were there and the history did not lead to them, or the disk answered too late.",
    "",
  ],
  corrupt: ["A block on disk was damaged; it was dropped and never used.", "Look at the disk."],
  identity_changed: ["The model, its type or the block size is another one than then.", ""],
  tenant: ["The blocks belong to somebody else.", ""],
  template_rewrote: [
    "The chat template writes earlier turns differently now.",
    "History keep goes on from what was said.",
  ],
  history_edited: ["The history that was sent differs from the stored one.", ""],
  recompute_was_sooner: ["Computing was sooner than loading what was found.", ""],
  cache_off: ["The prefix cache is off.", "Turn on cache.prefix_cache."],
  bypassed: ["The request asked not to use the cache.", ""],
};

/** Why tokens were computed again: a sentence, and what helps ("" where nothing does). */
export function reasonInWords(reason) {
  const known = REASONS[reason];
  return known ?? [`The engine says: ${reason}.`, ""];
}

/** Short form for a badge. */
export function missInShort(miss) {
  if (miss.reason === "none") return "nothing missed";
  if (miss.reason === "first_turn") return "first turn";
  return `missed: ${miss.reason.replaceAll("_", " ")}`;
}
