// The overview: findings first, each with the way to its evidence; then the key figures, where time and memory go, what the run is.

import { chart } from "./chart.js";
import { fill, h, s } from "./dom.js";
import { bytes, count, percent, seconds, written } from "./forms.js";
import { address } from "./link.js";
import { own } from "./own.js";
import { dressed } from "./theme.js";
import { say, says, t } from "./words.js";

const MOST = 12; // findings that stand open; the others are a click away
const FORMS = { fraction: "percent", s: "seconds", bytes: "bytes" }; // of a metric's unit

export async function drawOverview(host, { data, about }) {
  const time = h("div"), memory = h("div");
  const alone = about.sources.every((source) => source === "plan"); // a plan's own verdict comes first, a run's before that of its plan
  fill(host, stopped(data.stopped), alone ? planned(data.plan) : null, verdict(data), outside(data), findings(data.findings), tiles(data), alone ? null : planned(data.plan, { heading: true }),
    h("div", { class: "halves" }, timePart(data.time, time), memoryPart(data.memory, memory), facts(data.facts), laws(data.findings)));
  if (data.time.bars?.length) {
    await chart(time, data.time.charts.time, dressed(data.time.bars), { label: t("where_time") });
  }
  if (data.memory.bars?.length) {
    await chart(memory, data.memory.charts.memory, dressed(data.memory.bars), { label: t("where_memory") });
  }
}

// ---------------------------------------------------------------------------------------------------------------- findings

const SHAPES = {
  fail: ["M5 1h6l4 4v6l-4 4H5l-4-4V5z", "M5.5 5.5l5 5m0-5l-5 5"],
  warn: ["M8 1.5L15 14H1z", "M8 6v4m0 1.6v.4"],
  pass: ["M8 1a7 7 0 100 14A7 7 0 008 1z", "M4.8 8.2l2.2 2.3 4.2-4.6"],
  skipped: ["M8 1a7 7 0 100 14A7 7 0 008 1z", "M5 8h6"],
};

// A verdict by shape, colour and word.
function mark(of, { silent = false } = {}) {
  const [outline, sign] = own(SHAPES, of) ?? SHAPES.skipped;
  return h("span", { class: `verdict ${of}` },
    s("svg", { viewBox: "0 0 16 16", width: 16, height: 16, "aria-hidden": "true" },
      s("path", { d: outline, class: "outline" }), s("path", { d: sign, class: "sign" })),
    silent ? null : h("span", null, t(`verdict_${of}`)));
}

// One verdict: a metric outside its healthy range is no finding, and yet all is not well.
function verdict({ findings, counts, unhealthy }) {
  const bad = (counts.fail ?? 0) + (counts.warn ?? 0);
  const worst = counts.fail ? "fail" : bad || unhealthy.length ? "warn" : counts.pass ? "pass" : "skipped";
  const said = bad ? t("to_look_at") : unhealthy.length ? t(findings.length ? "only_outside" : "outside_healthy", { n: unhealthy.length })
    : counts.pass ? t("all_well") : t("nothing_checked");
  return h("p", { class: `headline ${worst}` }, mark(worst), h("strong", null, said), tally(counts));
}

// What is not as it is where things go well: numbers, not yet alarms. Where there is nothing worse the verdict has said so.
function outside({ unhealthy: metrics, counts }) {
  if (!metrics.length) return null;
  const links = metrics.slice(0, MOST).flatMap((metric, at) => [at ? ", " : "",
    h("a", { href: address("signals", { find: metric.name }) }, `${metric.name} ${written(metric.value, typeof metric.value === "number" ? FORMS[metric.unit] ?? "number" : null)}`)]);
  const said = counts.fail || counts.warn ? [t("outside_healthy", { n: metrics.length }), " "] : null;
  return h("p", { class: "note", id: "unhealthy" }, said, links, metrics.length > MOST ? " …" : "");
}

function tally(counts) {
  const parts = ["fail", "warn", "skipped", "pass"].filter((of) => counts[of]).map((of) => t(`count_${of}`, { n: counts[of] }));
  return parts.length ? h("span", { class: "note" }, parts.join(" · ")) : null;
}

function findings(all) {
  const open = together(all.filter((row) => row.verdict === "fail" || row.verdict === "warn"));
  const [first, more] = [open.slice(0, MOST), open.slice(MOST)];
  return [
    first.length ? h("ul", { class: "findings" }, first.map(finding)) : null,
    more.length ? h("details", null, h("summary", null, t("more_findings", { n: more.length })), h("ul", { class: "findings" }, more.map(finding))) : null,
    folded(all.filter((row) => row.verdict === "skipped"), "skipped"),
    folded(all.filter((row) => row.verdict === "pass"), "pass"),
  ];
}

// Findings of one name at several steps as one, with the others under it.
function together(rows) {
  const found = new Map();
  for (const row of rows) {
    const key = `${row.verdict}/${row.id}`;
    if (found.has(key)) found.get(key).again.push(row);
    else found.set(key, { ...row, again: [] });
  }
  return [...found.values()];
}

function finding(row) {
  const change = row.fix && (row.fix.from ? `${row.fix.key}: ${row.fix.from} → ${row.fix.to}` : `${row.fix.key} = ${row.fix.to ?? ""}`);
  const place = [row.stage, row.step === null || row.step === undefined ? null : t("step_n", row),
    row.rank === null || row.rank === undefined ? null : `${t("rank")} ${row.rank}`].filter(Boolean).join(" · ");
  return h("li", { class: `finding ${row.verdict}` },
    h("p", { class: "what" }, mark(row.verdict), h("code", null, row.id), place && h("span", { class: "note" }, place),
      row.confidence ? h("span", { class: "note" }, t("sure", { share: percent(row.confidence) })) : null,
      row.link && h("a", { class: "to", href: address(row.link.view, row.link.asked) }, t("look_at", { view: t(row.link.view) }))),
    h("p", { class: "message" }, says(row, "message")),
    change && h("p", null, h("b", null, t("change_to")), " ", h("code", null, change)),
    row.next_step && h("p", null, h("b", null, t("next_step")), " ", says(row, "next_step")),
    row.evidence?.length ? h("details", null, h("summary", null, t("evidence", { n: row.evidence.length })),
      h("ul", null, says(row, "evidence").map((line) => h("li", null, line)))) : null,
    row.again.length ? h("details", null, h("summary", null, t("again", { n: row.again.length })),
      h("ul", null, row.again.map((other) => h("li", null, other.link
        ? h("a", { href: address(other.link.view, other.link.asked) }, says(other, "message")) : says(other, "message"))))) : null);
}

function folded(rows, of) {
  if (!rows.length) return null;
  return h("details", { class: "folded" },
    h("summary", null, mark(of, { silent: true }), ` ${t(`count_${of}`, { n: rows.length })}`),
    h("ul", null, rows.map((row) => h("li", null, h("code", null, row.id), " ", says(row, "message"),
      row.needs?.length ? h("span", { class: "note" }, ` ${t("needs")} ${says(row, "needs").join("; ")}`) : null))));
}

function stopped(where) {
  if (!where) return null;
  const words = where.state === "open" ? "is_in" : "stopped_in";
  const places = where.places.map(({ step, stage, phase, ranks }) => t(words, {
    place: [step === null ? null : t("step_n", { step }), [stage, phase].filter(Boolean).join("/")].filter(Boolean).join(", "),
    ranks: ranks.filter((rank) => rank !== null).length > 1 ? t("on_ranks", { n: ranks.length }) : "",
  }));
  if (!places.length) places.push(where.step === null ? t("no_step_yet") : t("last_heard", { step: where.step }));
  return h("p", { class: `headline ${where.state === "open" ? "pass" : "fail"}` },
    h("strong", null, `${t(`state_${where.state}`)}: `), places.join("; "));
}

// ----------------------------------------------------------------------------------------------------------------- figures

function tiles({ figures, cost_said }) {
  return [
    figures.length ? h("div", { class: "tiles" }, figures.map(tile)) : null,
    cost_said ? h("p", { class: "note", id: "own_cost" }, `${t("own_cost")}: ${say(cost_said)}`) : null,
  ];
}

function tile(row) {
  const notes = [
    row.first === null ? null : t("from_first", { value: written(row.first, row.form), step: row.course[0][0] }),
    row.unhealthy ? t("outside", { low: bound(row.healthy[0]), high: bound(row.healthy[1]) }) : null, row.note && say(row.note),
  ].filter(Boolean);
  return h("a", { class: "tile", href: address(row.link.view, row.link.asked), "data-figure": row.key, title: say(row.means) || null },
    h("span", { class: "title" }, say(row.title)),
    h("span", { class: "figure" }, row.unhealthy ? mark("warn", { silent: true }) : null, written(row.value, row.form)),
    course(row),
    notes.map((note) => h("span", { class: "note" }, note)));
}

const bound = (value) => (value === null ? "∞" : written(value, "number"));

// The course of a figure over the steps, small; the last point is marked.
function course({ course: points, form }) {
  if (points.length < 2) return null;
  const [width, height, pad] = [140, 28, 3];
  const values = points.map(([, value]) => value);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const [from, to] = [points[0][0], points.at(-1)[0]];
  const x = (step) => pad + ((step - from) / (to - from || 1)) * (width - 2 * pad);
  const y = (value) => height - pad - ((value - low) / (high - low || 1)) * (height - 2 * pad);
  const line = points.map(([step, value], at) => `${at ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("");
  const [step, value] = points.at(-1);
  const label = t("course", { from, to, low: written(low, form), high: written(high, form) });
  return s("svg", { class: "course", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label },
    s("title", null, label), s("path", { d: line }), s("circle", { cx: x(step), cy: y(value), r: 2.5 }));
}

// ---------------------------------------------------------------------------------------------------------- time and memory

const which = (row) => `${t(row.which)} (${t("step_n", row)})`;

function timePart(time, host) {
  const missing = (time.missing ?? []).map((sentence) => h("p", { class: "missing" }, say(sentence)));
  if (!time.rows?.length) return missing.length ? h("section", null, h("h3", null, t("where_time")), missing) : null;
  const steps = Object.keys(time.whole);
  const stages = [...new Set(time.rows.map((row) => row.stage))];
  const of = (stage, side) => time.rows.find((row) => row.stage === stage && row.which === side);
  const waits = time.rows.some((row) => row.waited_seconds);
  const at = Object.fromEntries(steps.map((side) => [side, time.rows.find((row) => row.which === side).step]));
  const last = (stage) => of(stage, "last");
  return h("section", { id: "time" }, h("h3", null, t("where_time")), host, missing,
    h("table", { class: "legend" },
      h("thead", null, h("tr", null, h("th", { scope: "col" }, t("stage")), steps.map((side) => h("th", { scope: "col", class: "numeric" }, which({ which: side, step: at[side] }))),
        h("th", { scope: "col", class: "numeric" }, t("share")), waits ? h("th", { scope: "col", class: "numeric" }, t("waited")) : null)),
      h("tbody", null, stages.map((stage) => h("tr", null,
        h("td", null, swatch(`stage-${stage}`), h("a", { href: address("signals", { step: at.last, stage }) }, stage)),
        steps.map((side) => h("td", { class: "numeric" }, written(of(stage, side)?.seconds, "seconds"))),
        h("td", { class: "numeric" }, written(last(stage)?.share, "percent")),
        waits ? h("td", { class: "numeric" }, waited(last(stage))) : null)),
      h("tr", { class: "sum" }, h("td", null, t("whole_step")), steps.map((side) => h("td", { class: "numeric" }, seconds(time.whole[side]))),
        h("td"), waits ? h("td") : null))),
    steps.includes("middle") ? h("p", { class: "note" }, t("middle_is")) : null,
    waits ? h("p", { class: "note" }, t("waits_are_paler")) : null);
}

function waited(row) {
  if (!row?.waited_seconds) return written(null);
  return `${seconds(row.waited_seconds)}${row.slowest_rank === null ? "" : ` (${t("rank")} ${row.slowest_rank})`}`;
}

function swatch(name) {
  return h("span", { class: "swatch", style: { background: `var(--${name}, var(--residue))` }, "aria-hidden": "true" });
}

function memoryPart(memory, host) {
  const missing = (memory.missing ?? []).map((sentence) => h("p", { class: "missing" }, say(sentence)));
  const sides = Object.entries(memory.peaks);
  if (!sides.length) return h("section", null, h("h3", null, t("where_memory")), missing);
  const kinds = [...new Set(memory.bars.map((bar) => bar.kind))];
  const size = (kind, side) => memory.bars.find((bar) => bar.kind === kind && bar.which === side)?.bytes;
  return h("section", { id: "peak" }, h("h3", null, t("where_memory")), host, missing,
    h("table", { class: "legend" },
      h("thead", null, h("tr", null, h("th", { scope: "col" }, t("kind")), sides.map(([side]) => h("th", { scope: "col", class: "numeric" }, t(`source_${side === "planned" ? "plan" : "record"}`))))),
      h("tbody", null, kinds.map((kind) => h("tr", null,
        h("td", { title: say(memory.means[kind]) || null }, swatch(kind === "unknown" ? "residue" : kind), kind === "unknown" ? t("unknown_kind") : kind),
        sides.map(([side]) => h("td", { class: "numeric" }, written(size(kind, side), "bytes"))))),
      h("tr", { class: "sum" }, h("td", null, t("peak")), sides.map(([, peak]) => h("td", { class: "numeric" }, bytes(peak.peak)))))),
    sides.map(([side, peak]) => h("p", { class: "note" }, peakAt(side, peak))),
    memory.allocator && memory.allocator.allocated !== memory.peaks.recorded?.peak
      ? h("p", { class: "note" }, t("allocator_at", { size: bytes(memory.allocator.allocated), place: placed(memory.allocator) })) : null,
    memory.limit ? h("p", { class: "note" }, t("limit_is", { limit: bytes(memory.limit) })) : null);
}

function placed({ stage, phase, step, rank }) {
  return [[stage, phase].filter(Boolean).join("/"), step === null ? "" : t("step_n", { step }), rank === null ? "" : `${t("rank")} ${rank}`].filter(Boolean).join(", ");
}

function peakAt(side, peak) {
  const asked = Object.fromEntries(["stage", "rank", "step"].map((name) => [name, peak[name]]));
  return [`${t(`source_${side === "planned" ? "plan" : "record"}`)}: ${t("peak_in")} `, h("a", { href: address("memory", asked) }, placed(peak)),
    peak.limit ? ` (${t("of_limit", { share: percent(peak.peak / peak.limit) })})` : ""];
}

// --------------------------------------------------------------------------------------------------------- plan, facts, laws

function planned(plan, { heading = false } = {}) {
  if (!plan) return null;
  const fits = { pass: "fits", fail: "fits_not", skipped: "fits_unknown" }[plan.fits];
  return h("section", { class: "plan" }, heading ? h("h3", null, t("the_plan")) : null,
    h("p", { class: `headline ${!plan.starts || plan.fits === "fail" ? "fail" : plan.fits === "skipped" ? "skipped" : "pass"}` },
      mark(plan.starts ? "pass" : "fail", { silent: true }), h("strong", null, t(plan.starts ? "starts" : "starts_not")),
      mark(plan.fits, { silent: true }), h("strong", null, t(fits))),
    plan.chain.length ? h("ol", { class: "chain", "aria-label": t("chain") }, plan.chain.map(link)) : null);
}

function link({ symbol, name, size, per_rank, times, part_of }) {
  return h("li", null, h("code", null, symbol), h("b", null, count(size)), h("span", null, say(name)),
    per_rank ? h("span", { class: "note" }, t("per_rank", { n: count(per_rank) })) : null,
    times ? h("span", { class: "note" }, t("times", { n: count(times), whole: part_of })) : null);
}

function facts(pairs) {
  return h("section", null, h("h3", null, t("what_it_is")),
    h("dl", { class: "facts" }, pairs.map(([word, value]) => [h("dt", null, t(word)), h("dd", null, told(word, value))])));
}

function told(word, value) {
  if (word === "fact_state") return t(`state_${value}`);
  return typeof value === "object" ? say(value) : String(value);
}

function laws(all) {
  const rows = all.filter((row) => row.order === "laws");
  if (!rows.length) return null;
  const n = (of) => rows.filter((row) => row.verdict === of).length;
  const parts = ["pass", "fail", "skipped"].filter(n).map((of) => t(`laws_${of}`, { n: n(of) }));
  return h("section", { id: "laws" }, h("h3", null, `${t("laws")}: ${parts.join(", ")}`),
    h("ul", { class: "laws" }, rows.map((row) => h("li", null, mark(row.verdict), h("span", null, h("code", null, row.id), " ", says(row, "message"))))));
}
