// Two axes for lifetimes: the stages one after another, each as wide as what happens in it, or the time.

import { spread } from "./flow_columns.js";
import { t } from "./words.js";

const RIGHT = 16; // pixels left free at the right edge

// Births, readings and releases within a column stand in their order, what is at one time in one place; where no time is known, births
// come first and releases last.
export function byStage(data, rows, { left, width, measure }) {
  const columns = placed(data, rows, { left, width, measure });
  const last = columns.at(-1);
  const place = inOrder(columns, rows);
  const lines = rows.map((row) => {
    const x0 = stays(row) ? left : place(row.born, row.born_ms ?? -Infinity);
    const x1 = Math.max(x0 + 2, row.freed === null ? last.x + last.width - RIGHT : place(row.freed, row.freed_ms ?? Infinity));
    const due = row.due === null || row.due >= (row.freed ?? columns.length) ? x1 : columns[row.due].x + columns[row.due].width - 4;
    const reads = row.reads.flatMap((at, nth) => (at === null ? [] : [row.reads_ms?.[nth] == null ? columns[at].middle : place(at, row.reads_ms[nth])]));
    const plan = row.plan && [columns[row.plan.born].x + 4, row.plan.freed === null ? x1 : columns[row.plan.freed].x + columns[row.plan.freed].width - 4];
    return { row, x0, x1, due: Math.max(due, x0), reads: reads.map((x) => Math.min(Math.max(x, x0), x1)), plan, open: openAt(row) };
  });
  return { columns, lines, ticks: [], width: Math.max(width, last.x + last.width) };
}

// (column, time) → x: the times of a column, evenly apart.
function inOrder(columns, rows) {
  const times = columns.map(() => new Set());
  for (const row of rows) {
    if (!stays(row)) times[row.born].add(row.born_ms ?? -Infinity);
    if (row.freed !== null) times[row.freed].add(row.freed_ms ?? Infinity);
    row.reads.forEach((at, nth) => { if (at !== null && row.reads_ms?.[nth] != null) times[at].add(row.reads_ms[nth]); });
  }
  const slot = (time, nth, all) => [time, all.length > 1 ? nth / (all.length - 1) : Number(time === Infinity)];
  const slots = times.map((set) => new Map([...set].sort((a, b) => a - b).map(slot)));
  return (at, time) => columns[at].x + 6 + (columns[at].width - 12) * slots[at].get(time);
}

// What was there before the step: nobody saw it made in it, or it stays from step to step and has not begun in this one.
export function stays(row) {
  return row.born === null || (row.lifetime === "persistent" && !row.begins);
}

// What is never freed: it stays, or nobody saw it.
function openAt(row) {
  if (row.freed_at !== null) return null;
  return row.lifetime === "persistent" ? "stays" : "unseen";
}

// A column has room for its heading, and more where more begins and ends in it.
function placed(data, rows, { left, width, measure }) {
  const after = measure(t("flow_after"), false) + 16;
  const least = data.columns.map((column) => Math.max(40, measure(column.phase ?? column.stage ?? "·", true) + 12));
  const count = data.columns.map((_, at) => rows.filter((row) => row.born === at || row.freed === at).length);
  return spread(data.columns, { least, share: count.map((many) => 1 + Math.min(many, 16) / 4), left, width, after });
}

// Each at its time; the stages are the bands between. What has no time is not moved, but left out.
export function byTime(data, rows, { left, width, measure }) {
  const timed = rows.filter((row) => row.born_ms !== null || row.freed_ms !== null || stays(row));
  const spans = [...data.intervals].sort((a, b) => a.begin_ms - b.begin_ms);
  const end = Math.max(...spans.map((span) => span.end_ms ?? span.begin_ms), ...timed.map((row) => row.freed_ms ?? 0)) || 1;
  const x = (ms) => left + ((width - left - 60) * Math.max(0, ms)) / end;
  const edge = width - 60;
  const interval = (at) => spans.find((span) => span.stage === data.columns[at]?.stage);
  const columns = spans.map((span, at) => {
    const stop = span.end_ms ?? end;
    const [from, wide] = [x(span.begin_ms), x(stop) - x(span.begin_ms)];
    const role = data.columns.find((column) => column.stage === span.stage)?.role ?? null;
    const fits = measure(span.stage, true) < wide;
    return {
      stage: span.stage, phase: null, quiet: !fits, role, seconds: (stop - span.begin_ms) / 1e3,
      at, x: from, odd: at % 2 === 1, width: wide, middle: from + wide / 2,
    };
  });
  const lines = timed.map((row) => {
    const x0 = stays(row) ? left : x(row.born_ms ?? interval(row.born)?.begin_ms ?? 0);
    const x1 = Math.max(x0 + 2, row.freed_ms === null ? edge : x(row.freed_ms));
    const due = row.due === null || row.due >= (row.freed ?? data.columns.length) ? x1 : Math.max(x0, x(interval(row.due)?.end_ms ?? end));
    const reads = row.reads.flatMap((at, nth) => row.reads_ms?.[nth] ?? middle(interval(at)) ?? []);
    return { row, x0, x1, due, reads: reads.map((ms) => Math.min(Math.max(x(ms), x0), x1)), plan: null, open: openAt(row) };
  });
  return { columns, lines, ticks: marks(end).map((ms) => ({ ms, x: x(ms) })), width };
}

function middle(span) {
  return span?.end_ms == null ? null : (span.begin_ms + span.end_ms) / 2;
}

// Round times, eight of them or a few less.
function marks(end) {
  const power = 10 ** Math.floor(Math.log10(end / 8));
  const step = power * [1, 2, 5, 10].find((one) => (power * one * 8) >= end);
  return Array.from({ length: Math.floor(end / step) + 1 }, (_, at) => at * step);
}
