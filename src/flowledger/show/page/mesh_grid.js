// The grid of ranks: one panel for each place along the axes that are neither across nor down, in it a cell for each rank or class.

import { s } from "./dom.js";
import { count } from "./forms.js";
import { FORM, ofRanks, warmth } from "./mesh_heat.js";
import { stops } from "./mesh_way.js";
import { t } from "./words.js";

const HEAD = 20, SIDE = 46, PANEL = 22, WIDTH = 1200;

// Where a rank stands: its place along any axis, and the cell that it is in.
export function position(data, rank) {
  const at = (axis) => {
    const found = data.axes.find((one) => one.axis === axis);
    return found ? found.steps.reduce((place, [stride, degree]) => place * degree + (Math.floor(rank / stride) % degree), 0) : 0;
  };
  const cell = data.cells.find((one) => members(data, one).includes(rank)) ?? data.cells[0];
  return { at, cell };
}

const listed = new WeakMap(); // cell → its ranks

// The ranks of a cell, from what `spans` wrote of them: `0-3, 8`, `0-1016:8`; where it left some out, by their places.
export function members(data, cell) {
  if (!listed.has(cell)) listed.set(cell, cell.ranks.includes("…") ? byPlace(data, cell) : spread(cell.ranks));
  return listed.get(cell);
}

function byPlace(data, cell) {
  const inside = Object.fromEntries(Object.entries(cell.at).map(([axis, [, places]]) => [axis, places.includes("…") ? null : new Set(spread(places))]));
  return Array.from({ length: data.size }, (_, rank) => rank).filter((rank) => data.axes.every(({ axis, steps }) => {
    const place = steps.reduce((at, [stride, degree]) => at * degree + (Math.floor(rank / stride) % degree), 0);
    return inside[axis] === null || inside[axis]?.has(place) !== false;
  }));
}

function spread(text) {
  return text.split(", ").flatMap((part) => {
    const [span, stride] = part.split(":");
    const [first, last] = span.split("-").map(Number);
    const found = [];
    for (let at = first; at <= (last ?? first); at += Number(stride ?? 1)) found.push(at);
    return found;
  });
}

export function drawGrid(state) {
  const { data, axes, sample } = state;
  const panels = new Map();
  for (const cell of data.cells) {
    const key = axes.rest.map((axis) => `${axis} ${cell.at[axis][1]}`).join(" · ");
    if (!panels.has(key)) panels.set(key, []);
    panels.get(key).push(cell);
  }
  const columns = places(data, axes.across), rows = places(data, axes.down);
  const gap = sample ? 36 : 8, gapDown = sample ? 20 : 8;  // room for the way of a sample
  const inSlot = Math.max(...[...panels.values()].map((cells) => most(cells, axes)));
  const perRow = Math.max(1, Math.min(panels.size, Math.floor(WIDTH / (SIDE + columns.length * inSlot * (78 + gap)))));
  const width = Math.max(54, Math.min(240, (WIDTH / perRow - SIDE - gap) / (columns.length * inSlot) - gap));
  const tight = width >= 80 && width < 190 && data.cells.length <= 32;
  const height = (width < 80 ? 44 : tight ? 77 : 62) + (sample ? 34 : 0);
  const wide = SIDE + columns.length * (inSlot * (width + gap)) + 8, tall = PANEL + HEAD + rows.length * (height + gapDown) + 8;
  const centres = new Map(), drawn = [];
  [...panels].forEach(([title, cells], number) => {
    const x = (number % perRow) * (wide + 8), y = Math.floor(number / perRow) * tall;
    drawn.push(heads(state, title, columns, rows, { x, y, width: inSlot * (width + gap), height: height + gapDown }));
    const filled = new Map();
    for (const cell of cells) {
      const column = columns.indexOf(place(cell, axes.across)), row = rows.indexOf(place(cell, axes.down));
      const nth = filled.get(`${column},${row}`) ?? 0;
      filled.set(`${column},${row}`, nth + 1);
      const left = x + SIDE + (column * inSlot + nth) * (width + gap), top = y + PANEL + HEAD + row * (height + gapDown);
      centres.set(cell, { x: left, y: top, width, height });
      drawn.push(drawCell(state, cell, { x: left, y: top, width, height, columns: columns.length * inSlot }));
    }
  });
  const whole = { width: perRow * (wide + 8), height: Math.ceil(panels.size / perRow) * tall };
  const svg = s("svg", { class: "mesh-grid", viewBox: `0 0 ${whole.width} ${whole.height}`, width: whole.width, height: whole.height,
    role: "group", "aria-label": t("mesh_grid_label", { across: axes.across ?? "—", down: axes.down ?? "—" }) }, drawn);
  if (sample) svg.append(...arrows(state, centres));
  return wrapped(svg);
}

function wrapped(svg) {
  const box = document.createElement("div");
  box.className = "scroll mesh-box";
  box.append(svg);
  return box;
}

const place = (cell, axis) => (axis ? cell.at[axis][1] : "");

function places(data, axis) {
  if (!axis) return [""];
  const found = new Map(data.cells.map((cell) => [cell.at[axis][1], cell.at[axis][0]]));
  return [...found].sort((a, b) => a[1] - b[1]).map(([label]) => label);
}

function most(cells, axes) {
  const counted = new Map();
  for (const cell of cells) {
    const slot = `${place(cell, axes.across)}|${place(cell, axes.down)}`;
    counted.set(slot, (counted.get(slot) ?? 0) + 1);
  }
  return Math.max(...counted.values());
}

function heads({ axes }, title, columns, rows, { x, y, width, height }) {
  const text = (content, more) => s("text", { class: "mesh-axis", ...more }, content);
  return [
    title ? text(title, { x: x + SIDE, y: y + 14, class: "mesh-panel" }) : null,
    axes.across ? columns.map((label, at) => text(`${axes.across} ${label}`, { x: x + SIDE + at * width + 2, y: y + PANEL + 13 })) : null,
    axes.down ? rows.map((label, at) => text(`${axes.down} ${label}`, { x, y: y + PANEL + HEAD + at * height + 16 })) : null,
  ].flat().filter(Boolean);
}

// One rank or class: its number, what it did, what it has, and what the chosen sample met here.
function drawCell(state, cell, { x, y, width, height, columns }) {
  const { data, heat, rank, set, sample } = state;
  const ranks = members(data, cell);
  const number = heat && ofRanks(heat, ranks);
  const chosen = rank !== null && ranks.includes(rank);
  const marks = sample ? stops(sample, ranks) : [];
  const lines = described(cell, width);
  const name = cell.count > 1 ? `×${count(cell.count)}` : `${cell.first}`;
  const value = number ? FORM[heat.name](cell.count > 1 ? number.mean : number.most) : "";
  const says = [`${t("rank")} ${cell.ranks}`, cell.name, value && `${t(`mesh_heat_${heat.name}`)} ${value}`,
    cell.count > 1 && number ? t("mesh_most", { value: FORM[heat.name](number.most), rank: number.at }) : "", ...lines,
    ...marks].filter(Boolean).join("; ");
  const choose = () => set({ rank: chosen && cell.count === 1 ? null : cell.first }, `rank-${cell.first}`);
  const fits = (text, wide = 6.1) => (text.length * wide > width - 8 ? `${text.slice(0, Math.max(1, Math.floor((width - 14) / wide)))}…` : text);
  return s("g", {
    class: `mesh-cell${chosen ? " chosen" : ""}${marks.length ? " met" : ""}`, role: "button", tabindex: 0, "aria-pressed": String(chosen),
    "aria-label": says, "data-focus": `rank-${cell.first}`, "data-rank": cell.first, onclick: choose,
    onkeydown: (event) => keys(event, choose, columns),
  },
  s("title", null, says),
  s("rect", { x, y, width, height, rx: 4, class: "mesh-paper" }),
  heat ? s("rect", { x, y, width, height, rx: 4, class: "mesh-warm", style: { fillOpacity: String(0.5 * warmth(heat, number && (cell.count > 1 ? number.mean : number.most))) } }) : null,
  s("rect", { x, y, width, height, rx: 4, class: "mesh-edge" }),
  s("text", { x: x + 6, y: y + 16, class: "mesh-name" }, name),
  s("text", { x: x + width - 6, y: y + 16, class: "mesh-number" }, value),
  lines.slice(0, width < 80 ? 1 : Math.floor((height - 32 - (sample ? 34 : 0)) / 15)).map((line, at) => s("text", { x: x + 6, y: y + 34 + at * 15, class: "mesh-line" }, fits(line))),
  marks.slice(0, 2).map((mark, at) => s("text", { x: x + 6, y: y + height - 22 + at * 15, class: "mesh-mark" }, fits(mark, 6.9))));
}

// What a cell has, in two lines; in three where it is narrow.
function described(cell, width) {
  const part = (name, short) => cell[name] && `${t(`mesh_short_${short}`)} ${cell[name].which ?? `×${count(cell[name].count)}`}`;
  const rest = [part("heads", "heads"), part("experts", "experts")].filter(Boolean).join(" · ");
  const holds = width < 190 ? [part("layers", "layers"), rest] : [[part("layers", "layers"), rest].filter(Boolean).join(" · ")];
  const samples = cell.samples && t("mesh_samples_of", { count: count(cell.samples.count), share: Math.round((cell.share ?? 0) * 100) });
  return [...holds, samples].filter(Boolean);
}

function keys(event, choose, columns) {
  const cells = [...event.currentTarget.parentNode.querySelectorAll(".mesh-cell")];
  const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
  if (event.key === "Enter" || event.key === " ") choose();
  else if (step) cells[cells.indexOf(event.currentTarget) + step]?.focus();
  else return;
  event.preventDefault();
}

// From who sampled the chosen sample to who trains on it.
function arrows({ data, sample }, centres) {
  const cellOf = (rank) => data.cells.find((cell) => members(data, cell).includes(rank));
  const from = sample.hops.find((hop) => hop.stage === "rollout")?.ranks ?? [];
  const to = [...new Set(sample.trained.map((part) => part.rank))];
  const pairs = from.flatMap((one) => to.map((other) => [cellOf(one), cellOf(other)])).filter(([a, b]) => a && b && a !== b);
  const unique = [...new Map(pairs.map(([a, b]) => [`${a.first}-${b.first}`, [a, b]])).values()];
  return [
    s("defs", null, s("marker", { id: "mesh-head", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" },
      s("path", { d: "M0,0 L8,4 L0,8 z", class: "mesh-head" }))),
    ...unique.map(([a, b]) => s("path", { d: curve(centres.get(a), centres.get(b)), class: "mesh-arrow", "marker-end": "url(#mesh-head)" },
      s("title", null, t("mesh_moved", { from: a.ranks, to: b.ranks })))),
  ];
}

// From the foot of one cell to the head of another that stands below it, or from edge to edge where they stand side by side.
function curve(a, b) {
  const side = Math.sign(b.x - a.x);
  const x1 = side ? a.x + (side > 0 ? a.width : 0) : a.x + a.width * 0.75, y1 = side ? a.y + a.height - 30 : b.y > a.y ? a.y + a.height : a.y;
  const x2 = side ? b.x + (side > 0 ? -2 : b.width + 2) : b.x + b.width * 0.75, y2 = side ? b.y + b.height - 26 : b.y > a.y ? b.y - 2 : b.y + b.height + 2;
  const half = side ? [(x1 + x2) / 2, y1, (x1 + x2) / 2, y2] : [x1, (y1 + y2) / 2, x2, (y1 + y2) / 2];
  return `M${x1},${y1} C${half[0]},${half[1]} ${half[2]},${half[3]} ${x2},${y2}`;
}
