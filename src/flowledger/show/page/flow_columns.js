// The columns that flow and lifetimes share: bands, headings, and the way to name a place.

import { s } from "./dom.js";
import { seconds } from "./forms.js";
import { t } from "./words.js";

export const TOP = 62; // the height of the headings

// The band of a column.
export function columned(column, floor) {
  return s("rect", { class: column.odd ? "column odd" : "column", x: column.x, y: 0, width: column.width, height: floor });
}

// Stages, below them who works there and how long, below these the phases. `says(stage)`: for a screen reader; `act(stage)`: where one can choose.
export function headings(columns, { says, act, chosen, measure, floor }) {
  const groups = [];
  for (const column of columns) {
    const last = groups.at(-1);
    if (last && last[0].stage === column.stage && column.stage !== null) last.push(column);
    else groups.push([column]);
  }
  const taken = [0, 0];
  return groups.map((group) => {
    const [first] = group;
    const wide = group.reduce((sum, column) => sum + column.width, 0);
    const middle = first.x + wide / 2;
    if (first.after) {
      return s("g", { class: "heading" }, s("text", { x: middle, y: 18, "text-anchor": "middle", class: "soft" }, t("flow_after")));
    }
    if (first.quiet) return quiet(first, taken, measure);
    const choose = act && (() => act(first.stage));
    return s("g", {
      class: chosen === first.stage ? "heading on" : "heading", tabindex: act ? 0 : null, role: act ? "button" : null,
      "data-stage": first.stage, "aria-pressed": act ? String(chosen === first.stage) : null, "aria-label": act ? says(first.stage) : null,
      onclick: choose, onkeydown: choose && pressed(choose),
    },
    s("rect", { class: "target", x: first.x, y: 0, width: wide, height: group.length > 1 ? 38 : TOP - 8 }),
    s("text", { x: middle, y: 18, "text-anchor": "middle", class: "stage" }, first.stage ?? "·"),
    s("text", { x: middle, y: 32, "text-anchor": "middle", class: "soft small" }, beneath(first, wide, measure)),
    group.slice(1).map((column) => s("path", { class: "divider", d: `M${column.x} 42 V${floor}` })),
    group.length > 1 && s("path", { class: "bracket", d: `M${first.x + 6} 42 v-3 h${wide - 12} v3` }),
    group.length > 1 && group.map((column) => s("text", { x: column.middle, y: 53, "text-anchor": "middle", class: "soft small" }, column.phase)));
  });
}

// The name of a column that is narrower than it: below the others, as far as there is room.
function quiet({ stage, x, width, middle }, taken, measure) {
  const half = measure(stage, false) / 2;
  const line = taken.findIndex((end) => middle - half > end + 6);
  if (line >= 0) taken[line] = middle + half;
  return s("g", { class: "heading" }, s("title", null, stage), s("rect", { class: "target", x, y: 0, width, height: TOP }),
    line >= 0 && s("text", { x: middle, y: 44 + 13 * line, "text-anchor": "middle", class: "soft small" }, stage));
}

// Who works in a stage and how long, or what of it there is room for.
function beneath({ role, seconds: spent }, wide, measure) {
  const time = spent === null ? null : seconds(spent);
  const both = [role, time].filter(Boolean).join(" · ");
  return measure(both, false) < wide - 4 ? both : time ?? role;
}

// Where a column is: `update_actor/loss`.
export function named(column) {
  if (!column) return t("flow_after");
  return column.phase ? `${column.stage}/${column.phase}` : column.stage;
}

// The widths of texts, as the drawings write them.
export function measurer() {
  const context = document.createElement("canvas").getContext("2d");
  const sans = getComputedStyle(document.documentElement).getPropertyValue("--sans").trim();
  return (text, bold) => {
    context.font = bold ? `600 11px ${sans}` : `10.5px ${sans}`;
    return context.measureText(text).width;
  };
}

// Enter and the space bar do what a click does.
export function pressed(act) {
  return (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    act();
  };
}

// The arrows go from one strand, or bar, to the one below or above.
export function walked(event) {
  const at = event.target.closest?.(".strand");
  const next = { ArrowDown: at?.nextElementSibling, ArrowUp: at?.previousElementSibling }[event.key];
  if (!next) return;
  event.preventDefault();
  next.focus();
}

// Columns beside each other from `left` on, and one for what is after the step: each has what it needs at least, and of what is over
// its share. Every other stage is odd, so that bands can be told apart.
export function spread(columns, { least, share, left, width, after }) {
  const spare = Math.max(0, width - left - after - least.reduce((a, b) => a + b, 0));
  const all = share.reduce((a, b) => a + b, 0);
  let x = left;
  let stages = -1;
  const placed = columns.map((column, at) => {
    if (at === 0 || columns[at - 1].stage !== column.stage) stages += 1;
    const wide = least[at] + (spare * share[at]) / all;
    const made = { ...column, at, x, odd: stages % 2 === 1, width: wide, middle: x + wide / 2 };
    x += wide;
    return made;
  });
  return [...placed, { stage: null, phase: null, at: placed.length, x, odd: stages % 2 === 0, width: after, middle: x + after / 2, after: true }];
}
