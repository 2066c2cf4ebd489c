// Memory: kinds over the instants of a step, the peak taken apart, and the rows of the ledger beneath.

import { chart } from "./chart.js";
import { fill, h } from "./dom.js";
import { ABSENT, bytes, count, percent, shape } from "./forms.js";
import { insight } from "./lazy.js";
import { unpacked } from "./packed.js";
import { pick } from "./pick.js";
import { table } from "./table.js";
import { dressed } from "./theme.js";
import { say, t } from "./words.js";

const KINDS = ["param", "grad", "optimizer", "activation", "kv_cache", "comm_buffer", "temporary", "batch", "residue"];

export function drawMemory(host, shown) {
  const { data, asked } = shown;
  const process = data.processes.find((one) => one.process === asked.process) ?? data.processes[0];
  const rows = unpacked(process.readings).map((row) => ({ ...row, chosen: Boolean(asked.stage) && row.stage === asked.stage }));
  fill(host,
    controls(shown, process, rows),
    peak(process),
    course(shown, process, rows),
    readings(shown, rows),
    apart(process, data.source),
    section(data.source === "plan" ? "memory_allocator_planned" : "memory_allocator", process.charts.allocator, rows, shown, { note: "memory_allocator_note", height: 190 }),
    section("memory_stages", process.charts.stages, process.stages, shown, { note: "memory_stages_note", height: 330 }),
    section("memory_tokens", process.charts.tokens, process.tokens, shown, { note: "memory_tokens_note", height: 260 }),
    overRanks(shown),
    estimates(data.estimates),
  );
}

function controls({ data, asked, choices, set }, process, rows) {
  const held = (name) => new Set(choices.map((one) => one[name]).filter((one) => one !== undefined));
  const options = (name, listed, note) => {
    const there = held(name);
    const known = listed.filter((one) => there.has(String(one[name])) || one[name] === data[name]);
    if (!known.some((one) => one[name] === data[name])) known.unshift({ [name]: data[name] });
    return known.map((one) => [one[name], note(one) ? `${one[name]} · ${note(one)}` : one[name]]);
  };
  const steps = options("step", data.steps, (one) => (one.watched && data.source !== "plan" ? t("memory_watched") : ""));
  const ranks = options("rank", data.ranks, (one) => [
    one.why && t(`memory_${one.why}`), one.alike > 1 && t("memory_alike", { count: one.alike }),
  ].filter(Boolean).join(", "));
  const stages = [...new Set(rows.map((row) => row.stage).filter(Boolean))];
  return h("div", { class: "controls" },
    data.step === null ? null : pick(t("step"), steps, data.step, (step) => set({ step })),
    data.rank === null ? null : pick(t("rank"), ranks, data.rank, (rank) => set({ rank })),
    data.processes.length < 2 ? null
      : pick(t("memory_process"), data.processes.map((one) => [one.process, one.process]), process.process, (chosen) => set({ process: chosen })),
    pick(t("stage"), [["", t("memory_all_stages")], ...stages.map((one) => [one, one])], asked.stage ?? "", (stage) => set({ stage })),
    !process.hides || !process.charts.residue ? null : h("label", null,
      h("input", { type: "checkbox", checked: asked.residue === "1", onchange: (event) => set({ residue: event.target.checked ? "1" : null }) }),
      t("memory_with_residue")));
}

function peak({ peak: found }) {
  return found && h("div", { class: "memory-peak" }, found.says.map((sentence, at) => h(at ? "p" : "strong", null, say(sentence))));
}

function course(shown, process, rows) {
  const { data } = shown;
  const whole = process.hides && shown.asked.residue === "1" && process.charts.residue;
  const asked = whole ? "allocated" : "known";
  const drawn = !process.hides ? rows : rows.filter((row) => (row[asked] ?? null) !== null)
    .map((row, at) => (whole ? { ...row, at } : { ...row, at, residue: null, untold: null, peak: row.peak > row.known ? null : row.peak }));
  const planned = rows.some((row) => (row.planned ?? null) !== null);
  const notes = [whole ? "memory_residue_note" : data.source === "plan" ? "memory_by_kind_note_planned" : "memory_by_kind_note", planned && "memory_dashed_note", !whole && process.hides && "memory_hides_note"];
  return section("memory_by_kind", whole ? process.charts.residue : process.charts.kinds, drawn, shown, {
    height: 430, note: notes.filter(Boolean),
  });
}

// A chart under its name. Its room is kept while it is drawn, so that what one looks at does not move.
function section(name, spec, rows, { asked, set }, { note, height, values = {} } = {}) {
  if (!spec) return null;
  const place = h("div", { style: { minHeight: `${height}px` } });
  const choose = (row) => {
    if (row.stage && name !== "memory_ranks") set({ stage: asked.stage === row.stage ? null : row.stage });
    if (name === "memory_ranks" && row.rank !== undefined) set({ rank: String(row.rank) });
  };
  insight(place, () => chart(place, dressed(spec), rows, { label: t(name), onclick: choose }));
  return h("figure", null, h("h3", null, t(name)), 
    note && h("p", { class: "note" }, [note].flat().map((one) => t(one, values)).join(t("memory_between"))), place);
}

// The rows of the memory ledger, as `show RUN memory` has them.
function readings({ asked }, rows) {
  const listed = rows.filter((row) => (row.listed ?? null) !== null && (!asked.stage || row.stage === asked.stage)).sort((a, b) => a.listed - b.listed);
  const has = (name) => listed.some((row) => (row[name] ?? null) !== null);
  const place = (row) => (row.stage ? [row.stage, row.phase].filter(Boolean).join("/") : t("memory_whole_step"));
  const sizes = [...KINDS, "known", "allocated", "reserved", "peak_since_stage", "device_used", "host_used", "limit"].filter(has);
  const columns = [
    { name: "stage", title: t("stage"), cell: place }, { name: "instant", title: t("memory_instant") },
    ...["mini_batch", "micro_batch"].filter(has).map((name) => ({ name, title: name.replace("_", "-"), form: "count" })),
    ...sizes.map((name) => ({ name, title: name === "known" ? t("memory_known") : name, form: "bytes", hint: t(`memory_${name}_is`) })),
    ...(has("fragmentation") ? [{ name: "fragmentation", title: "fragmentation", form: "percent", hint: t("memory_fragmentation_is") }] : []),
  ];
  const drawn = table(columns, listed, { label: t("memory_rows") });
  const title = asked.stage ? t("memory_rows_of", { stage: asked.stage, count: listed.length }) : t("memory_rows_all", { count: listed.length });
  return h("details", { class: "memory-rows", open: Boolean(asked.stage) }, h("summary", null, title), drawn);
}

function apart({ peak: found }, source) {
  if (!found) return null;
  const planned = source === "plan";
  const kinds = [
    { name: "kind", title: t("memory_kind"), cell: (row) => [swatch(row.kind), row.kind] },
    { name: "bytes", title: t("memory_bytes"), form: "bytes" },
    { name: "share", title: t("memory_share"), form: "percent", cell: (row) => [bar(row.share, row.kind), percent(row.share)] },
    { name: "what", title: t("memory_what"), cell: (row) => say(row.what) },
  ];
  const tensors = [
    { name: "tensor_name", title: t("tensor"), cell: (row) => row.tensor_name ?? h("span", { class: "absent", title: t("memory_unnamed") }, unnamed(row.kind, found.parts)) },
    { name: "kind", title: t("memory_kind"), cell: (row) => [swatch(row.kind), row.kind] },
    { name: "storages", title: t("memory_count"), form: "count", cell: counted },
    { name: "bytes", title: t(planned ? "memory_each" : "memory_bytes"), form: "bytes", hint: planned ? t("memory_each_is") : null },
    ...(planned ? [{ name: "total_bytes", title: t("memory_in_all"), form: "bytes", hint: t("memory_in_all_is") }] : []),
    { name: "local_shape", title: t("local_shape"), cell: (row) => (row.local_shape ? shape(row.local_shape) : ABSENT) },
  ];
  const of = (name, columns, rows, note) => rows.length ? h("div", null, h("h3", null, t(name)), table(columns, rows, { label: t(name) }), note) : null;
  const about = planned ? (found.pool ? say(found.pool) : null) : found.tensors.some((row) => row.tensor_name === null) ? t("memory_unnamed") : null;
  return h("div", { class: "memory-apart" }, of("memory_apart", kinds, found.parts),
    of(planned ? "memory_tensors_planned" : "memory_tensors", tensors, found.tensors, about && h("p", { class: "note" }, about)));
}

// How many there are; of a plan layers, times what a layer has of it.
function counted(row) {
  return row.each > 1 ? h("span", { title: t("memory_layers_times", row) }, [count(row.storages), h("div", { class: "note" }, t("memory_layers_times", row))]) : count(row.storages);
}

// What nobody has named is called by what it is for.
function unnamed(kind, parts) {
  const known = parts.find((one) => one.kind === kind);
  return known ? say(known.what) : kind;
}

function swatch(kind) {
  return h("span", { class: "swatch", style: { background: `var(--${kind})` } });
}

function bar(share, kind) {
  return h("span", { class: "memory-bar" }, h("span", { style: { width: `${Math.min(100, share * 100)}%`, background: `var(--${kind})` } }));
}

function overRanks(shown) {
  const { data } = shown;
  if (!data.charts.ranks) return null;
  const rows = data.ranks_spread.map((row) => ({ ...row, chosen: row.rank === data.rank }));
  const stages = new Set(rows.map((row) => row.stage)).size;
  const all = new Set(rows.map((row) => row.rank)).size;
  return section("memory_ranks", data.charts.ranks, rows, shown, {
    note: `memory_ranks_note_${rows[0].by}`, height: 24 * stages + 60, values: { all, rank: data.rank },
  });
}

function estimates(rows) {
  if (!rows.length) return null;
  const columns = [
    { name: "name", title: t("memory_estimate"), cell: (row) => [row.name, h("div", { class: "note mono" }, row.formula)] },
    { name: "estimate", title: t("memory_estimated"), form: "bytes" },
    { name: "measured", title: t("memory_measured"), form: "bytes", cell: (row) => (row.measured ? bytes(row.measured) : row.needs.length ? ABSENT : t("memory_not_measured")) },
    {
      name: "deviation", title: t("memory_deviation"), form: "percent",
      cell: (row) => (row.needs.length ? t("memory_needs", { needs: row.needs.join(", ") })
        : row.deviation === null ? ABSENT : `${row.deviation >= 0 ? "+" : ""}${(row.deviation * 100).toFixed(0)}%`),
    },
  ];
  return h("div", null, h("h3", null, t("memory_estimates")), h("p", { class: "note" }, t("memory_estimates_note")),
    table(columns, rows, { label: t("memory_estimates") }));
}
