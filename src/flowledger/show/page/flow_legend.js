// What kinds, marks and widths mean; and how kinds are told apart without colour.

import { s } from "./dom.js";
import { bytes } from "./forms.js";
import { thickness } from "./flow_layout.js";
import { own } from "./own.js";
import { t } from "./words.js";

export const KINDS = ["param", "optimizer", "batch", "kv_cache", "activation", "temporary", "comm_buffer", "grad"];

// What each kind looks like in black and white: lines and dots over its tint. Each drawing has patterns of its own, for those of
// one that is hidden are not drawn.
const MARKS = {
  param: "", optimizer: "M2 0 v6", batch: "", kv_cache: "M0 0 L6 6 M6 0 L0 6", activation: "M2 3 h1.6", temporary: "M0 6 L6 0",
  comm_buffer: "M0 3 h6", grad: "M0 0 L6 6",
};

export function pattern(kind, of) {
  return s("pattern", { id: `${of}-${kind}`, class: `kind-${kind}`, width: 6, height: 6, patternUnits: "userSpaceOnUse" },
    s("rect", { class: kind === "param" ? "tint strong" : "tint", width: 6, height: 6 }), own(MARKS, kind) && s("path", { class: "hatch", d: MARKS[kind] }));
}

// Kinds on the first line; below them `lines` of [word, how it is drawn at (x, y), the room that it takes]. `of`: whose patterns.
export function legended(of, kinds, lines, y, width) {
  const shown = kinds.map((kind) => [kind, (x, top) => s("rect", { class: "body", x, y: top - 5, width: 28, height: 10, fill: `url(#${of}-${kind})` }), 34, kind]);
  const parts = [];
  let row = y - 22;
  for (const line of [shown, ...lines]) {
    row += 22;
    let x = 4;
    for (const [key, mark, room = 22, kind = "batch"] of line) {
      const words = t(key);
      const wide = room + 6.4 * wideOf(words) + 18;
      if (x > 4 && x + wide > width) { x = 4; row += 22; }
      parts.push(s("g", { class: `kind-${kind}` }, mark?.(x, row), s("text", { x: x + room, y: row + 4, class: "small soft" }, words)));
      x += wide;
    }
  }
  return { drawn: s("g", { class: "legend" }, parts), bottom: row + 18 };
}

// What the marks of the flow mean, and how wide a strand of so many bytes is. `ends`: how pieces end.
export function explained(found, ends) {
  const marks = [
    ["flow_made", (x, y) => s("path", { class: "born", d: `M${x + 8} ${y - 6} v12` })],
    ["flow_made_again", (x, y) => s("path", { class: "again", d: diamond(x + 8, y, 5) })],
    ["flow_read", (x, y) => s("circle", { class: "read", cx: x + 8, cy: y, r: 2.7 })],
    ["flow_freed", (x, y) => s("path", { class: "freed", d: `M${x + 8} ${y - 6} v12` })],
    ["flow_held", (x, y) => s("path", { class: "held", d: `M${x} ${y} h16` })],
    ["flow_stays", (x, y) => s("path", { class: "goes-on", d: `M${x + 5} ${y - 6} l6 6 l-6 6` })],
    ["flow_held_by", (x, y) => s("path", { class: "flag", d: flag(x + 4, y) }), "held"],
    ["flow_ends_unseen", (x, y) => s("circle", { class: "unseen-end", cx: x + 8, cy: y, r: 2 }), "unseen"],
  ].filter(([, , end]) => !end || ends.has(end)).map(([key, mark]) => [key, mark]);
  const widths = sizes(found).map((size) => [`${bytes(size)}B`, (x, y) => s("rect", {
    class: "body", x, y: y - thickness(size) / 2, width: 26, height: thickness(size), fill: "url(#flow-batch)",
  }), 32]);
  return [marks, [...widths, ["flow_width", null, 0]]];
}

function wideOf(words) {
  return [...words].reduce((sum, one) => sum + (one.charCodeAt(0) > 0x2e80 ? 1.9 : 1), 0);
}

// Three round sizes that span what is drawn.
function sizes(found) {
  if (!found.length) return [];
  const power = (size) => Math.round(Math.log2(size) / 10);
  const [low, high] = [Math.max(0, power(Math.min(...found))), power(Math.max(...found))];
  const steps = [...new Set([low, Math.round((low + high) / 2), high])];
  return steps.map((one) => 1024 ** one * (one === 0 ? 64 : 1));
}

export function diamond(x, y, r) {
  return `M${x} ${y - r} l${r * 0.8} ${r} l${-r * 0.8} ${r} l${-r * 0.8} ${-r} Z`;
}

export function flag(x, y) {
  return `M${x} ${y + 5} v-11 h8 l-2.5 3 l2.5 3 h-8`;
}
