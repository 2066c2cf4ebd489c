// Lifetimes: which tensor lives from where to where, who reads it, and which outlive what needs them.

import { fill, h } from "./dom.js";
import { look } from "./flow_card.js";
import { measurer, named, walked } from "./flow_columns.js";
import { KINDS } from "./flow_legend.js";
import { saved } from "./flow_save.js";
import { ABSENT, bytes, written } from "./forms.js";
import { bars } from "./lifetimes_chart.js";
import { byStage, byTime, stays } from "./lifetimes_axes.js";
import { t } from "./words.js";

const LEAST = 900; // pixels; in a narrower window the drawing is moved sideways

const before = { height: 0, focus: null }; // of the last drawing: what was chosen in it keeps the focus, and the page its place

export function drawLifetimes(host, shown) {
  const { data, asked, about, set } = shown;
  const all = [...data.persistent.map(staying), ...data.rows];
  const rows = sorted(all.filter((row) => matches(row, asked)));
  const timed = data.intervals.length > 0 && data.rows.some((row) => row.born_ms !== null);
  const axis = timed && asked.axis === "time" ? "time" : "stages";
  const scroll = h("div", { class: "scroll", style: { minHeight: `${before.height}px` } });
  const tip = h("div", { class: "flow-card", role: "status", hidden: true });
  fill(host, controls(shown, all, { axis, timed, save: () => saved(scroll.querySelector("svg"), `${about.run}-lifetimes.svg`) }),
    data.planned ? null : h("p", { class: "note" }, t("lifetimes_outliving_is")), scroll, tip);
  if (!rows.length) return void fill(scroll, h("p", { class: "note" }, t("lifetimes_none")));
  const measure = measurer();
  const width = Math.max(LEAST, Math.floor(scroll.clientWidth || LEAST));
  const left = Math.max(...rows.map((row) => measure(titled(row), true) + measure(` ×${row.storages ?? ""}`, false))) + 74;
  const placed = (axis === "time" ? byTime : byStage)(data, rows, { left, width, measure });
  const on = {
    choose: (row) => {
      before.focus = `${row.tensor_name} ${row.born_at}`;
      set({ tensor: asked.tensor === row.tensor_name ? null : row.tensor_name });
    },
    look: (line, element, event) => look(tip, card(line.row, data), element, event),
    leave: () => { tip.hidden = true; },
  };
  fill(scroll, bars(placed.lines.map((line) => ({ ...line, name: titled(line.row), group: stays(line.row) ? null : line.row.born_at })), placed.columns, {
    width: placed.width, left, ticks: placed.ticks, on, said: (line) => spoken(line.row, data), chosen: asked.tensor, measure,
    label: t("lifetimes_label", { bars: rows.length }),
  }));
  host.onkeydown = walked;
  before.height = scroll.firstChild.getBoundingClientRect().height;
  scroll.style.minHeight = "";
  const again = [...scroll.querySelectorAll("[data-tensor]")].find((one) => `${one.dataset.tensor} ${one.dataset.born}` === before.focus);
  if (again) again.focus({ preventScroll: true });
  before.focus = null;
}

// What stays and has no storage of its own in the rows: there before the step, and after it.
function staying(row) {
  const unknown = ["born", "freed", "due", "born_at", "freed_at", "born_ms", "freed_ms", "storages", "holder"];
  return { ...Object.fromEntries(unknown.map((name) => [name, null])), ...row, outlives: false };
}

function titled(row) {
  return row.tensor_name ?? `(${row.kind ?? t("lifetimes_unnamed")})`;
}

function matches(row, asked) {
  if (asked.kind && row.kind !== asked.kind) return false;
  return asked.outliving !== "1" || row.outlives === true;
}

// By birth, then by kind, the largest first; before all others what stays.
function sorted(rows) {
  const kind = (row) => (KINDS.includes(row.kind) ? KINDS.indexOf(row.kind) : KINDS.length);
  const born = (row) => (stays(row) ? -1 : row.born);
  const place = (row) => (stays(row) ? "" : row.born_at);
  return [...rows].sort((a, b) =>
    born(a) - born(b) || place(a).localeCompare(place(b)) || kind(a) - kind(b) || (b.bytes ?? 0) - (a.bytes ?? 0));
}

function controls({ data, asked, choice, choices, set }, all, { axis, timed, save }) {
  const kinds = KINDS.filter((kind) => all.some((row) => row.kind === kind));
  const steps = [...new Set(choices.map((one) => one.step).filter((one) => one !== undefined))].sort((a, b) => a - b);
  const outliving = all.filter((row) => row.outlives).length;
  const option = (value, title, now) => h("option", { value, selected: now === value }, title);
  return h("div", { class: "controls" },
    h("label", null, t("kind"), h("select", { onchange: (event) => set({ kind: event.target.value || null }) },
      option("", t("lifetimes_every_kind"), asked.kind ?? ""), kinds.map((kind) => option(kind, kind, asked.kind)))),
    h("label", null, h("input", {
      type: "checkbox", checked: asked.outliving === "1", onchange: (event) => set({ outliving: event.target.checked ? "1" : null }),
    }), t("lifetimes_only_outliving", { count: outliving })),
    timed && h("fieldset", { class: "either" }, h("legend", null, t("lifetimes_axis")),
      [["stages", t("lifetimes_by_stage")], ["time", t("lifetimes_by_time")]].map(([value, title]) => h("label", null, h("input", {
        type: "radio", name: "lifetimes-axis", value, checked: axis === value, onchange: () => set({ axis: value === "time" ? "time" : null }),
      }), title))),
    steps.length > 1 && h("label", null, t("step"), h("select", { onchange: (event) => set({ step: event.target.value }) },
      steps.map((step) => option(step, step, choice.step)))),
    axis === "stages" && data.rows.some((row) => row.plan) && h("span", { class: "note" }, t("lifetimes_plan_above")),
    h("button", { type: "button", class: "save", onclick: save }, t("flow_save")));
}

function facts(row, data) {
  const reads = row.reads.map((at, nth) => (at === null ? row.readers[nth] : named(data.columns[at])));
  return [
    [t("lifetimes_made_in"), row.born_at ?? t("flow_was_there")], [t("flow_read_by"), reads.join(", ") || ABSENT],
    [t("lifetimes_freed_in"), freed(row)], [t("lifetimes_needed"), row.declared_freed_by ?? ABSENT],
    [t("kind"), row.kind ?? ABSENT], [t("flow_lifetime"), row.lifetime ?? ABSENT], [t("lifetimes_largest"), written(row.bytes, "bytes")],
    // A plan has a line a tensor, its largest form: how many layers have one, and what they come to, it does not say.
    ...(data.planned ? [] : [[t("lifetimes_times"), written(row.storages, "count")], [t("lifetimes_total"), written(row.total_bytes, "bytes")]]),
    [t("lifetimes_alive"), written(row.alive_ms, "milliseconds")],
    [t("lifetimes_holder"), row.holder ?? ABSENT],
    ...(row.plan ? [[t("source_plan"), planned(row.plan)]] : []),
  ];
}

function planned(plan) {
  return t("lifetimes_planned", { born: plan.born_at, freed: plan.freed_at ?? t("flow_stays"), bytes: bytes(plan.bytes ?? 0) });
}

function freed(row) {
  if (row.freed_at) return row.freed_at === "after the step" ? t("flow_after") : row.freed_at;
  return row.lifetime === "persistent" ? t("flow_stays") : t("lifetimes_not_seen");
}

function card(row, data) {
  return [h("strong", null, titled(row)), h("dl", null, facts(row, data).map(([name, value]) => [h("dt", null, name), h("dd", null, value)]))];
}

function spoken(row, data) {
  return [titled(row), ...facts(row, data).filter(([, value]) => value !== ABSENT).map(([name, value]) => `${name}: ${value}`),
    row.outlives ? t("flow_outlives", { holder: row.holder ?? t("flow_nobody") }) : null].filter(Boolean).join("; ");
}
