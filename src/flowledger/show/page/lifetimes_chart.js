// The drawing of lifetimes: a line for each tensor, a bar from its birth to its release.

import { s } from "./dom.js";
import { bytes, seconds } from "./forms.js";
import { columned, headings, pressed, TOP } from "./flow_columns.js";
import { KINDS, legended, pattern } from "./flow_legend.js";
import { t } from "./words.js";

const LINE = 18;
const BAR = 9;
const MARKS = [
  ["flow_read", (x, y) => s("path", { class: "tick-read", d: `M${x + 8} ${y - 6} v12` })],
  ["flow_freed", (x, y) => s("path", { class: "freed", d: `M${x + 8} ${y - 6} v12` })],
  ["flow_held", (x, y) => s("rect", { class: "over", x, y: y - 3, width: 16, height: 6 })],
  ["lifetimes_outlives", (x, y) => s("rect", { class: "over outlives", x, y: y - 3, width: 16, height: 6 })],
  ["flow_stays", (x, y) => s("path", { class: "goes-on", d: `M${x + 5} ${y - 6} l6 6 l-6 6` })],
  ["lifetimes_not_seen", (x, y) => s("text", { x: x + 6, y: y + 4, class: "small soft" }, "?")],
  ["source_plan", (x, y) => s("path", { class: "planned", d: `M${x} ${y} h16` })],
];
// Marks that not every drawing has, and who has one.
const SOME = {
  source_plan: (line) => line.plan, lifetimes_not_seen: (line) => line.open === "unseen", lifetimes_outlives: ({ row }) => row.outlives,
  flow_held: ({ row, due, x1 }) => !row.outlives && (due ?? x1) < x1 - 1,
};

// lines: [{ row, name, x0, x1, due, reads: [x], plan: [x0, x1]?, open }]. `on`: { choose, look, leave }.
export function bars(lines, columns, { width, left, ticks, on, said, chosen, measure, label }) {
  const floor = TOP + lines.length * LINE + 8;
  const kinds = KINDS.filter((kind) => lines.some(({ row }) => row.kind === kind));
  const marks = MARKS.filter(([key]) => !SOME[key] || lines.some(SOME[key]));
  const legend = legended("lifetimes", kinds, [marks], floor + (ticks.length ? 40 : 22), width);
  const height = legend.bottom;
  return s("svg", {
    class: chosen ? "flow lifetimes some" : "flow lifetimes", role: "group", "aria-label": label, viewBox: `0 0 ${width} ${height}`, width, height,
    xmlns: "http://www.w3.org/2000/svg",
  },
  s("defs", null, kinds.map((kind) => pattern(kind, "lifetimes"))),
  s("g", { class: "columns" }, columns.map((column) => columned(column, floor)), headings(columns, { measure, floor })),
  s("text", { x: 4, y: 53, class: "soft small" }, t("tensor")), s("text", { x: left - 10, y: 53, "text-anchor": "end", class: "soft small" }, t("flow_bytes")),
  s("g", { class: "strands" }, lines.map((line, at) => lined(line, TOP + at * LINE + LINE / 2, lines[at - 1], { left, width, on, said, chosen, measure }))),
  ticks.map(({ x, ms }) => s("g", { class: "tick" }, s("path", { d: `M${x} ${floor} v5` }),
    s("text", { x, y: floor + 17, "text-anchor": "middle", class: "soft small" }, seconds(ms / 1e3)))),
  legend.drawn);
}

function lined(line, y, before, { left, width, on, said, chosen, measure }) {
  const { row, name } = line;
  const picked = Boolean(chosen) && chosen === row.tensor_name;
  const act = row.tensor_name ? () => on.choose(row) : () => {};
  const top = y - BAR / 2;
  const need = Math.min(line.due ?? line.x1, line.x1);
  return s("g", {
    class: ["strand", `kind-${row.kind ?? "none"}`, row.outlives ? "outliving" : "", picked ? "on" : ""].filter(Boolean).join(" "),
    "data-tensor": row.tensor_name, "data-born": String(row.born_at), tabindex: 0, role: "button", "aria-label": said(line), "aria-pressed": String(picked),
    onclick: act, onkeydown: pressed(act), onfocus: (event) => on.look(line, event.currentTarget, null), onblur: on.leave,
    onpointerenter: (event) => on.look(line, event.currentTarget, event), onpointerleave: on.leave,
  },
  before && before.group !== line.group && s("path", { class: "rule", d: `M0 ${y - LINE / 2} H${width}` }),
  s("rect", { class: "target", x: 0, y: y - LINE / 2, width, height: LINE }),
  s("text", { x: 4, y: y + 4, class: row.tensor_name ? "name" : "soft" }, name, row.storages > 1 && s("tspan", { class: "shape", dx: 5 }, `×${row.storages}`)),
  s("text", { x: left - 10, y: y + 4, "text-anchor": "end", class: "small soft" }, row.bytes === null ? "·" : bytes(row.bytes)),
  line.plan && s("path", { class: "planned", d: `M${line.plan[0]} ${top - 3} H${line.plan[1]}` }),
  need < line.x1 - 1 && s("rect", { class: row.outlives ? "over outlives" : "over", x: need, y: top + 2, width: line.x1 - need, height: BAR - 4 }),
  s("rect", { class: "body", x: line.x0, y: top, width: Math.max(1.5, need - line.x0), height: BAR, rx: 1.5, fill: `url(#lifetimes-${row.kind})` }),
  line.reads.map((x) => s("path", { class: "tick-read", d: `M${x} ${top - 2} v${BAR + 4}` })),
  ended(line, top),
  row.outlives && flagged(line, y, { width, measure }));
}

// What holds it; left of its end where there is no room to the right.
function flagged({ row, x1 }, y, { width, measure }) {
  const words = row.holder ? t("lifetimes_held_by", { holder: row.holder }) : t("lifetimes_outlives");
  const wide = measure(words, true);
  const x = x1 + 8 + wide > width ? x1 - 6 - wide : x1 + 6;
  const ground = x < x1 && s("rect", { class: "flag-ground", x: x - 3, y: y - 7, width: wide + 6, height: 14, rx: 3 });
  return [ground, s("text", { x, y: y + 4, class: "flag" }, words)];
}

function ended({ row, x1, open }, top) {
  if (open === "stays") return s("path", { class: "goes-on", d: `M${x1 - 2} ${top - 2} l6 ${BAR / 2 + 2} l-6 ${BAR / 2 + 2}` });
  if (open) return s("text", { x: x1 + 3, y: top + BAR - 1, class: "small soft" }, "?");
  return s("path", { class: row.outlives ? "freed outlives" : "freed", d: `M${x1} ${top - 2} v${BAR + 4}` });
}
