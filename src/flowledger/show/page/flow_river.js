// The drawing of the flow: columns, strands, marks and legend, as one SVG that explains itself.

import { s } from "./dom.js";
import { columned, headings, pressed, TOP } from "./flow_columns.js";
import { diamond, explained, flag, KINDS, legended, pattern } from "./flow_legend.js";
import { PAD, thickness } from "./flow_layout.js";
import { t } from "./words.js";

const BEND = PAD + 1; // half of the way on which a strand goes from one height to another: where nothing begins or ends

// laid: what `laidOut` gives. `said(strand)`: what a screen reader says; `on`: { choose, look, leave, stage }; `chosen`: names.
export function river(laid, data, { width, said, on, chosen, label, measure }) {
  const kinds = KINDS.filter((kind) => laid.strands.some(({ strand }) => strand.kind === kind));
  const sizes = laid.strands.flatMap(({ strand }) => strand.pieces.map((piece) => piece.bytes)).filter((size) => size > 0);
  const floor = TOP + laid.height + 14;
  const legend = legended("flow", kinds, explained(sizes, new Set(laid.strands.flatMap(({ strand }) => strand.pieces.map((piece) => piece.ends)))), floor + 26, width);
  return s("svg", {
    class: ["flow", chosen.tensor || chosen.stage ? "some" : ""].join(" ").trim(), role: "group", "aria-label": label,
    viewBox: `0 0 ${width} ${legend.bottom}`, width, height: legend.bottom, xmlns: "http://www.w3.org/2000/svg",
  },
  s("defs", null, kinds.map((kind) => pattern(kind, "flow"))),
  s("g", { class: "columns" }, laid.columns.map((column) => columned(column, floor)), headings(laid.columns, {
    says: (stage) => t("flow_stage_says", { stage, does: stageSays(stage, data) }), act: on.stage, chosen: chosen.stage, measure, floor,
  })),
  s("g", { class: "strands", transform: `translate(0 ${TOP})` }, laid.strands.map((one) => stranded(one, laid.columns, { said, on, chosen }))),
  legend.drawn);
}

// ---------------------------------------------------------------------------------------------------------- strands

function stranded({ strand, pieces }, columns, { said, on, chosen }) {
  const name = strand.tensor_name;
  const touched = chosen.tensor === name || (chosen.stage && touches(strand, columns, chosen.stage));
  const act = () => on.choose(name);
  return s("g", {
    class: ["strand", `kind-${strand.kind ?? "none"}`, touched ? "on" : ""].join(" ").trim(), "data-tensor": name,
    tabindex: 0, role: "button", "aria-label": said(strand), "aria-pressed": String(chosen.tensor === name),
    onclick: act, onkeydown: pressed(act), onfocus: (event) => on.look(strand, event.currentTarget, null), onblur: on.leave,
    onpointerenter: (event) => on.look(strand, event.currentTarget, event), onpointerleave: on.leave,
  }, pieces.map((piece) => pieced(strand, piece, columns)));
}

function touches(strand, columns, stage) {
  const there = (at) => columns[at]?.stage === stage;
  return strand.reads.some(there) || strand.writes.some(there) || strand.pieces.some((piece) => there(piece.born) || (there(piece.freed) && piece.ends !== "stays"));
}

function pieced(strand, placed, columns) {
  const { piece, x0, x1, need, texts } = placed;
  const half = thickness(piece.bytes) / 2;
  const points = way(placed, columns, x0, need, half);
  const reads = strand.reads.filter((at) => at >= (piece.born ?? 0) && at <= piece.freed);
  const at = (x) => height(placed, columns, x);
  const marks = piece.made.filter(([column]) => piece.born === null || column > piece.born);
  return [
    piece.freed > piece.until && s("path", { class: piece.outlives ? "held outlives" : "held", d: line(way(placed, columns, need, x1, 0)) }),
    s("path", { class: "target", d: line(points), "stroke-width": Math.max(half * 2, 10) }),
    s("path", { class: "body", d: ribbon(points, half, piece.born === null), fill: `url(#flow-${strand.kind})` }),
    piece.born !== null && s("path", { class: "born", d: `M${x0} ${at(x0) - half - 2.5} v${2 * half + 5}` }),
    marks.map(([column]) => s("path", { class: "again", d: diamond(columns[column].x + PAD, at(columns[column].x + PAD), Math.max(half, 1.5) + 2) })),
    ended(piece, x1, at(x1), piece.freed > piece.until ? 1 : half),
    reads.map((column) => s("circle", { class: "read", cx: columns[column].middle, cy: at(columns[column].middle), r: 2.7 })),
    texts.map((text) => worded(text, text.run, half)),
  ];
}

function worded(text, run, half) {
  return s("text", { class: "label", x: text.x, y: text.left ? run.y + 3.7 : run.y - half - 3.2 }, text.name && s("tspan", { class: "name" }, text.name),
    text.shape && s("tspan", { class: "shape", dx: text.name ? 5 : 0 }, text.shape));
}

function ended(piece, x, y, half) {
  if (piece.ends === "stays") return s("path", { class: "goes-on", d: `M${x - 6} ${y - half - 3} l6 ${half + 3} l-6 ${half + 3}` });
  if (piece.ends === "unseen") return s("circle", { class: "unseen-end", cx: x, cy: y, r: 2 });
  if (piece.ends === "held") return s("path", { class: "flag", d: flag(x, y) });
  return s("path", { class: piece.outlives ? "freed outlives" : "freed", d: `M${x} ${y - half - 3.5} v${2 * half + 7}` });
}

// [x, y] of the middle of a strand between two places, bent where its runs change.
function way(placed, columns, from, to) {
  const points = [[from, height(placed, columns, from)]];
  for (const column of columns.slice(1)) {
    if (column.x <= from || column.x >= to) continue;
    const [before, behind] = [runAt(placed, column.at - 1).y, runAt(placed, column.at).y];
    if (before !== behind) {
      points.push([Math.max(from, column.x - BEND), before], [Math.min(to, column.x + BEND), behind]);
    }
  }
  points.push([to, height(placed, columns, to)]);
  return points;
}

function runAt({ runs }, column) {
  return runs.find((run) => run.from <= column && column <= run.to) ?? (column < runs[0].from ? runs[0] : runs.at(-1));
}

function height(placed, columns, x) {
  const column = columns.find((one) => x <= one.x + one.width + 0.01) ?? columns.at(-1);
  return runAt(placed, column.at).y;
}

function line(points) {
  return points.map(([x, y], at) => (at === 0 ? `M${x} ${y}` : step(points[at - 1], [x, y]))).join(" ");
}

function step([x, y], [a, b]) {
  return y === b ? `L${a} ${b}` : `C${(x + a) / 2} ${y} ${(x + a) / 2} ${b} ${a} ${b}`;
}

// A ribbon: its upper edge there, its lower edge back.
function ribbon(points, half) {
  const up = points.map(([x, y]) => [x, y - half]);
  const down = points.map(([x, y]) => [x, y + half]).reverse();
  return `${line(up)} L${down[0][0]} ${down[0][1]} ${line(down).replace(/^M\S+ \S+/, "")} Z`;
}

// Which tensors a stage makes, reads and is the last to need.
export function stageSays(stage, data) {
  const here = new Set(data.columns.flatMap((column, at) => (column.stage === stage ? [at] : [])));
  const names = (which) => data.strands.filter(which).map((strand) => strand.tensor_name).join(", ");
  const parts = [
    ["flow_makes", names((strand) => strand.pieces.some((piece) => piece.made.some(([at, use]) => here.has(at) && use !== null)))],
    ["flow_reads", names((strand) => strand.reads.some((at) => here.has(at)))],
    ["flow_frees", names((strand) => strand.pieces.some((piece) => piece.ends !== "stays" && here.has(piece.freed)))],
  ];
  return parts.filter(([, found]) => found).map(([key, found]) => t(key, { tensors: found })).join("; ");
}
