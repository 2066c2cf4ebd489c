// Where everything of the flow stands: columns from left to right, strands below one another in one order that holds in every
// column, so that no two of them ever cross.

import { spread } from "./flow_columns.js";

export const LINE = 12; // the height of a label
const GAP = 5; // between strands
export const PAD = 13; // between the edge of a column and what is born or ends in it
const HELD = 1.4; // the width of a strand that nobody needs any more
const CALM = 16; // pixels: for less a strand does not leave its height
const RISE = 96; // pixels: by no more does it rise at once
const ORDER = ["param", "optimizer", "batch", "kv_cache", "activation", "temporary", "comm_buffer", "grad"];

// Pixels of a strand: half a pixel more each time its bytes double.
export function thickness(bytes) {
  return Math.max(1.4, bytes > 1 ? Math.log2(bytes) / 2 : 0);
}

// columns: [{ stage, phase, x, width, middle }] and `after`, what lies behind the last; strands in their order, each with `pieces`: its
// runs { from, to, x0, x1, y, w } and marks. `label(strand, use)`, `form(use)`: texts; `measure(text, bold)`: their widths.
export function laidOut(data, { width, label, form, measure, heading, afterwards }) {
  const columns = placed(data, { width, measure, heading, afterwards });
  const strands = ordered(data.strands);
  const floor = columns.map(() => 0); // how far down each column is filled
  const made = strands.map((strand) => ({
    strand,
    pieces: strand.pieces.map((piece, at) => piecePlaced(strand, piece, at, { columns, floor, label, form, measure })),
  }));
  return { columns, strands: made, height: Math.max(...floor, 0) };
}

function placed(data, { width, measure, heading, afterwards }) {
  const born = data.columns.map((_, at) => data.strands.filter((strand) => strand.pieces.some((piece) => piece.born === at)).length);
  const least = data.columns.map((column) => Math.max(48, measure(heading(column), true) + 14));
  const after = measure(afterwards, false) + 16;
  return spread(data.columns, { least, share: born.map((count) => 1 + Math.min(count, 5) / 2), left: 0, width, after });
}

// What stays first, for it is straight; then kind by kind, in each those that are made first, of these those that live longest.
function ordered(strands) {
  const kind = (strand) => (ORDER.includes(strand.kind) ? ORDER.indexOf(strand.kind) : ORDER.length);
  const first = (strand) => strand.pieces[0]?.born ?? -1;
  const last = (strand) => strand.pieces[0]?.until ?? -1;
  return [...strands].sort((a, b) => kind(a) - kind(b) || first(a) - first(b) || last(b) - last(a));
}

function piecePlaced(strand, piece, number, { columns, floor, label, form, measure }) {
  const end = columns.length - 1;
  const born = piece.born ?? 0;
  const x0 = piece.born === null ? 0 : columns[born].x + PAD;
  const ends = Math.min(piece.freed, end);
  const until = Math.min(piece.until, end);
  const edge = columns[end].x + columns[end].width;
  const x1 = piece.ends === "stays" ? edge - 8 : ends === end ? columns[end].middle : columns[ends].x + columns[ends].width - PAD;
  const need = until === ends ? x1 : columns[until].x + columns[until].width - PAD;
  const texts = texted(strand, piece, number, { columns, x0, label, form, measure, edge });
  const runs = runsOf(piece, { born, until, ends, end, texts, columns });
  runs.forEach((run, at) => settle(run, floor, runs[at - 1]));
  for (const text of texts) text.run = runs.find((run) => run.from <= text.column && text.column <= run.to) ?? runs[0];
  return { piece, x0, x1, need, runs, texts };
}

// The labels of a piece: its name and shape where it begins, its shape again where it is made in another one.
function texted(strand, piece, number, { columns, x0, label, form, measure, edge }) {
  const [name, first] = label(strand, piece, number);
  const wide = measure(name, true) + (first ? 6 + measure(first, false) : 0);
  const left = x0 + wide + 4 > edge && x0 - wide - 6 > 0;
  const found = [{ name, shape: first, x: left ? x0 - 5 - wide : x0 + 1, wide, left, column: piece.born ?? 0 }];
  let free = found[0].x + wide + 14;
  let shown = first;
  for (const [at, use] of left ? [] : piece.made.slice(piece.born === null ? 0 : 1)) {
    const text = use === null ? null : form(strand, use);
    if (!text || text === shown) continue;
    const x = Math.max(columns[at].x + PAD + 6, free);
    const long = measure(text, false);
    if (x + long > edge) break;
    found.push({ name: "", shape: text, x, wide: long, left: false, column: at });
    free = x + long + 14;
    shown = text;
  }
  return found;
}

// A piece is cut into runs that are straight: under its labels, from there to where it is needed last, and what is held longer.
function runsOf(piece, { born, until, ends, end, texts, columns }) {
  const w = thickness(piece.bytes);
  const column = (x) => { const found = columns.findIndex((one) => x < one.x + one.width); return found < 0 ? end : found; };
  const [first] = texts;
  const labelled = Math.max(...texts.map((text) => column(text.x + text.wide)), born);
  const beside = Math.max(0, (LINE - w) / 2);
  const runs = [{
    from: first.left ? column(first.x) : born, to: piece.ends === "stays" ? end : labelled, w,
    above: first.left ? beside : LINE, below: first.left ? beside : 0,
  }];
  const next = () => runs.at(-1).to + 1;
  if (until >= next()) runs.push({ from: next(), to: until, w, above: 0, below: 0 });
  if (ends >= next()) runs.push({ from: next(), to: ends, w: HELD, above: 0, below: 0, held: true });
  return runs;
}

// As high as what stands above allows; a little less high where that keeps a strand straight. What is only held goes on as it came, so that
// strands end apart.
function settle(run, floor, before) {
  let top = 0;
  for (let at = run.from; at <= run.to; at += 1) top = Math.max(top, floor[at]);
  run.y = top + run.above + run.w / 2;
  if (before && before.y >= run.y) run.y = run.held || before.y - run.y < CALM ? before.y : Math.max(run.y, before.y - RISE);
  const bottom = run.y + run.w / 2 + run.below + (run.held ? GAP - 1 : GAP);
  for (let at = run.from; at <= run.to; at += 1) floor[at] = bottom;
}
