// Signals: metrics in small multiples, alarms, the timeline of a step, distributions.

import { chart } from "./chart.js";
import { fill, h } from "./dom.js";
import { number } from "./forms.js";
import { insight } from "./lazy.js";
import { address, place } from "./link.js";
import { own } from "./own.js";
import { part } from "./store.js";
import { pick } from "./pick.js";
import { distributions } from "./signals_spread.js";
import { timeline } from "./signals_time.js";
import { search, table } from "./table.js";
import { dressed, drawn } from "./theme.js";
import { say, says, t } from "./words.js";

const POINTS = 40; // a line of so few is drawn with its points

export async function drawSignals(host, shown) {
  const { data, asked } = shown;
  const whole = data.metrics ? data : asOne((await part("signals", {})).data, data);
  if (whole.absent) return;
  const ask = (more, how) => shown.set({ ...place().asked, ...more }, how);
  const about = { whole, asked, ask };
  const metrics = h("div");
  const refresh = () => fill(metrics, groups(about, place().asked.find ?? ""));
  const find = search(asked.find, (value) => {
    history.replaceState(null, "", address("signals", { ...place().asked, find: value }));  // drawing all anew would take the field away
    refresh();
  });
  const steps = [...new Set([...whole.steps, ...whole.distributions.flatMap((one) => one.steps), ...whole.timelines.map((one) => one.step)])].sort((a, b) => a - b);
  fill(host,
    h("div", { class: "controls" }, find,
      steps.length > 1 && pick(t("step"), [["", t("signals_every_step")], ...steps.map((step) => [step, step])], asked.step ?? "", (step) => ask({ step }))),
    alarms(about),
    metrics,
    timeline(about), distributions(about, steps));
  refresh();
}

// A live page is given the timeline of a step by itself.
function asOne(whole, { timelines }) {
  return timelines?.length ? { ...whole, timelines } : whole;
}

// The groups that have something to show. Unfolded are the first, of those that are well known, and of each other what is outside its range.
function groups(about, find) {
  const words = find.toLowerCase().split(/\s+/).filter(Boolean);
  const fits = (one) => words.every((word) => `${one.name} ${one.level} ${one.unit} ${one.means ? say(one.means) : ""}`.toLowerCase().includes(word));
  const found = about.whole.metrics.filter(fits);
  const names = [...new Set(found.map((one) => one.group))];
  if (!found.length && about.whole.metrics.length) return h("p", { class: "note", role: "status" }, t("signals_none_found"));
  return names.map((name) => {
    const rows = found.filter((one) => one.group === name);
    const whole = words.length > 0 || name === names[0] || rows.some((one) => one.name === about.asked.metric);
    return group(about, name, rows, whole);
  });
}

function group(about, name, rows, whole) {
  const out = rows.filter((one) => one.outside);
  const open = whole || out.length > 0;
  const some = whole || !out.length ? rows : out; // the others are a click away
  const grid = h("div", { class: "signals" });
  const more = some.length < rows.length && h("button", { type: "button", class: "linklike", onclick: () => { drawnAll(rows); more.remove(); } },
    t("signals_others", { count: rows.length - some.length }));
  const drawnAll = (these) => fill(grid, these.map((one) => signal(about, one)));
  const fillIt = () => { if (!grid.childElementCount) drawnAll(some); };
  const made = h("details", { class: "signals-group", open, ontoggle: () => made.open && fillIt() },
    h("summary", null, h("h3", null, t(`signals_${name}`)), h("span", { class: "note" }, t("signals_count", { count: rows.length })),
      out.length ? h("span", { class: "note outside" }, t("signals_count_outside", { count: out.length })) : null), grid, more);
  if (open) fillIt();
  return made;
}

// One metric: its name, its last number, its course. A click on the name shows what it is, and its numbers.
function signal({ whole, asked, ask }, one) {
  const form = written(one);
  const at = one.values.findLastIndex((value) => value !== null);
  const last = at >= 0 ? one.values[at] : null;
  const special = one.special[whole.steps.length - 1]; // nan or inf, in the last step
  const told = special ?? (last === null ? "·" : form.tell(last));
  const chosen = asked.metric === one.name;
  const room = h("div", { style: { minHeight: chosen ? "260px" : "150px" } });
  const spec = { ...whole.charts.metric, height: chosen ? 220 : 120 };
  insight(room, () => {
    const rows = courseOf(one, whole, asked, form);
    chart(room, dressed(drawn(spec, rows)), rows, {
      label: t("signals_label", { name: one.name, steps: whole.steps.length, last: told }),
      onclick: (row) => row.step !== undefined && ask({ step: String(row.step) }),
    });
  });
  return h("figure", { class: chosen ? "signal chosen" : "signal", id: `signal-${one.name}` },
    h("figcaption", null,
      h("button", { type: "button", "aria-expanded": String(chosen), title: one.means ? say(one.means) : null, onclick: () => ask({ metric: chosen ? null : one.name }) }, one.name),
      h("span", { class: "last" }, told, form.unit && h("span", { class: "note" }, ` ${form.unit}`)),
      one.outside && h("span", { class: "outside" }, t("signals_outside", { range: range(one, form) }))),
    room,
    chosen && explained(one, whole, form));
}

function explained(one, whole, form) {
  const rows = whole.steps.map((step, at) => ({ step, value: one.values[at], special: one.special[at] ?? null }))
    .filter((row) => row.value !== null || row.special !== null);
  const columns = [
    { name: "step", title: t("step"), form: "count" },
    { name: "value", title: t("signals_value"), form: "number", cell: (row) => row.special ?? (row.value === null ? "·" : String(row.value)) },
  ];
  return h("div", { class: "signal-explained" },
    h("p", null, one.means ? say(one.means) : t("signals_unknown"), " ",
      h("span", { class: "note" }, t(one.recomputed ? "signals_recomputed" : "signals_told"), one.healthy ? ` ${t("signals_healthy", { range: range(one, form) })}` : "")),
    h("details", null, h("summary", null, t("signals_numbers", { count: rows.length })), table(columns, rows, { label: one.name })));
}

function courseOf(one, whole, asked, form) {
  const rows = [];
  const seen = one.values.filter((value) => value !== null).length <= POINTS;
  whole.steps.forEach((step, at) => {
    const value = one.values[at];
    const special = one.special[at];
    if (value === null && special === undefined) return;
    rows.push({ kind: "value", step, value: value === null ? null : value / form.size });
    if (value !== null) rows.push({ kind: "point", step, value: value / form.size, written: form.tell(value), seen });
    else rows.push({ kind: "special", step, written: special });
  });
  if (one.shade) rows.push({ kind: "healthy", low: one.shade[0] / form.size, high: one.shade[1] / form.size });
  const told = one.values.filter((value) => value !== null);
  if (told.length && isFlat(told) && !one.shade) {  // an axis of one number has no other
    const [value] = told;
    for (const sign of [-1, 1]) rows.push({ kind: "room", value: (value + sign * (Math.abs(value) / 10 || 1)) / form.size });
  }
  for (const alarm of whole.alarms) {
    if (alarm.step !== null && alarm.metrics.includes(one.name)) rows.push({ kind: "alarm", ...alarm, message: says(alarm, "message"), zh: null, evidence: null, metrics: null });
  }
  if (asked.step && whole.steps.includes(Number(asked.step))) rows.push({ kind: "chosen", step: Number(asked.step) });
  return rows;
}

// Whether numbers are one but for rounding.
function isFlat(values) {
  const [least, most] = [Math.min(...values), Math.max(...values)];
  return most - least <= 1e-9 * Math.max(Math.abs(least), Math.abs(most));
}

// Sizes of a unit, the largest first: the axis and the numbers beside it have the same.
const SIZES = {
  bytes: [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]],
  s: [[3600, "h"], [60, "min"], [1, "s"], [1e-3, "ms"]],
  fraction: [[0.01, "%"]],
};

// How a metric's numbers are written, and by what they are divided on its axis.
function written({ unit, values }) {
  const sizes = own(SIZES, unit);
  if (!sizes) return { size: 1, unit: unit === "1" ? "" : unit, tell: number };
  const most = Math.max(...values.map((value) => Math.abs(value ?? 0)));
  const [size, name] = sizes.find(([each]) => most >= each) ?? sizes.at(-1);
  return { size, unit: name, tell: (value) => number(Number((value / size).toPrecision(4))) };
}

function range(one, form) {
  const [low, high] = one.healthy.map((bound) => (bound === null ? null : form.tell(bound)));
  const said = low === null ? `≤ ${high}` : high === null ? `≥ ${low}` : `${low} … ${high}`;
  return form.unit ? `${said} ${form.unit}` : said;
}

function alarms({ whole, asked, ask }) {
  if (!whole.alarms.length) return null;
  return h("ul", { class: "alarms" }, whole.alarms.map((alarm) => h("li", { class: alarm.verdict },
    h("span", { class: "mark", "aria-hidden": "true" }, "▼"),
    h("div", null,
      h("strong", null, alarm.id), alarm.step === null ? null
        : h("button", { type: "button", class: "linklike", onclick: () => ask({ step: asked.step === String(alarm.step) ? null : String(alarm.step) }) }, `${t("step")} ${alarm.step}`),
      " ", says(alarm, "message"),
      alarm.metrics.map((name) => [" ", h("button", { type: "button", class: "linklike", onclick: () => ask({ find: name, metric: name }) }, name)]),
      h("p", { class: "note" }, says(alarm, "next_step"))))));
}
