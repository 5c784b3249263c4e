// What the tests ask of the page itself: names of controls, contrast of texts. Values only.

const seen = (node) => node.checkVisibility() && node.getClientRects().length > 0;

/** Controls without a name that is read aloud. */
function unnamed() {
  const controls = document.querySelectorAll("button, input, select, textarea, a[href], [role=meter], [tabindex]");
  return [...controls].filter((node) => seen(node) && !nameOf(node)).map((node) => node.outerHTML.slice(0, 200));
}

function nameOf(node) {
  const by = node.getAttribute("aria-labelledby");
  if (by) return by.split(" ").map((id) => document.getElementById(id)?.textContent).join(" ").trim();
  const label = node.getAttribute("aria-label");
  if (label) return label.trim();
  const labels = [...(node.labels ?? [])].map((found) => found.textContent).join(" ").trim();
  if (labels) return labels;
  return ["BUTTON", "A"].includes(node.tagName) ? node.textContent.trim() : "";
}

/** Ids that elements refer to and nobody has, and ids that two have. */
function badIds() {
  const ids = [...document.querySelectorAll("[id]")].map((node) => node.id);
  const twice = ids.filter((id, i) => ids.indexOf(id) !== i);
  const named = [...document.querySelectorAll("[aria-labelledby], [aria-describedby], label[for]")].flatMap((node) =>
    ["aria-labelledby", "aria-describedby", "for"].flatMap((name) => (node.getAttribute(name) ?? "").split(" ").filter(Boolean)),
  );
  return [...twice, ...named.filter((id) => !document.getElementById(id))];
}

/** Texts whose contrast to what is behind them is below `least`: text, ratio. */
function faint(least) {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const found = [];
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    const text = walker.currentNode.textContent.trim();
    if (!text || !seen(node) || node.closest(":disabled, option")) continue;
    const style = getComputedStyle(node);
    const ratio = contrast(over(parse(style.color), backOf(node)), backOf(node));
    if (ratio < least) found.push(`${text.slice(0, 60)} (${node.className || node.tagName}): ${ratio.toFixed(2)}`);
  }
  for (const node of document.querySelectorAll("textarea, input")) {
    if (!seen(node) || !node.placeholder) continue;
    const color = getComputedStyle(node, "::placeholder").color;
    const ratio = contrast(over(parse(color), backOf(node)), backOf(node));
    if (ratio < least) found.push(`placeholder ${node.placeholder}: ${ratio.toFixed(2)}`);
  }
  return found;
}

function parse(color) {
  const [r, g, b, a = 1] = color.match(/[\d.]+/g).map(Number);
  return [r, g, b, a];
}

function over([r, g, b, a], [R, G, B]) {
  return [r * a + R * (1 - a), g * a + G * (1 - a), b * a + B * (1 - a), 1];
}

function backOf(node) {
  const layers = [];
  for (let at = node; at; at = at.parentElement) {
    const color = parse(getComputedStyle(at).backgroundColor);
    layers.push(color);
    if (color[3] === 1) break;
  }
  return layers.reduceRight((below, layer) => over(layer, below), [255, 255, 255, 1]);
}

function luminance([r, g, b]) {
  const linear = (value) => (value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4);
  return 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
}

function contrast(a, b) {
  const [high, low] = [luminance(a), luminance(b)].sort((x, y) => y - x);
  return (high + 0.05) / (low + 0.05);
}
