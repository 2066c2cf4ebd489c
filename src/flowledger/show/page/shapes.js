// The shape ledger, to be searched, sorted and narrowed; a row opens what its tensor is for.

import { fill, h, s } from "./dom.js";
import { ABSENT, bytes, percent, shape, written } from "./forms.js";
import { address } from "./link.js";
import { own } from "./own.js";
import { search, table } from "./table.js";
import { say, t } from "./words.js";

const STATE = ["stage", "kind", "mismatch", "find", "sort", "down", "as", "tensor", "at", "dims"];

export function drawShapes(host, { data, asked }) {
  const state = Object.fromEntries(STATE.filter((name) => asked[name]).map((name) => [name, asked[name]]));
  const rows = data.rows.map((row) => ({ ...row, place: placeOf(row) }));
  const list = h("div"), panel = h("div");
  const remember = (more, { quietly = false } = {}) => {
    Object.assign(state, more);
    const link = address("shapes", { ...asked, ...Object.fromEntries(STATE.map((name) => [name, state[name]])) });
    if (link !== location.hash) history[quietly ? "replaceState" : "pushState"](null, "", link);
  };
  const lines = () => [...list.querySelectorAll("tbody tr")];
  const close = () => {
    const last = keyOf(state);
    show(null);
    lines().find((line) => line.dataset.row === last)?.focus();
  };
  const show = (row) => {
    remember(row ? { tensor: row.tensor_name, at: row.place, dims: row.dims } : { tensor: null, at: null, dims: null });
    open();
  };
  const open = () => {
    fill(panel, state.tensor ? explanation(state, rows, data, { close, show }) : null);
    for (const line of lines()) line.classList.toggle("chosen", line.dataset.row === keyOf(state));
    panel.querySelector("h3")?.focus({ preventScroll: true });
  };
  const named = () => { // each line with its row, and a rule where another stage begins
    let stage = null;
    for (const line of lines()) {
      const cell = line.querySelector("[data-key]");
      line.dataset.row = cell.dataset.key;
      line.classList.toggle("begins", stage !== null && stage !== cell.dataset.stage);
      stage = cell.dataset.stage;
    }
  };
  const narrow = (more, how) => { remember(more, how); draw(); };
  const draw = () => {
    const found = rows.filter((row) => (!state.stage || row.stage === state.stage) && (!state.kind || row.kind === state.kind) && (!state.mismatch || isApart(row)));
    const sorting = { find: state.find, sort: state.sort, down: state.down === "1" };
    const onstate = ({ sort, down }) => { remember({ sort, down: down ? "1" : null }, { quietly: true }); named(); };
    fill(list, found.length ? table(columns(data, state), found, { label: t("shapes"), state: sorting, onstate, onrow: show, mark })
      : h("p", { class: "note", role: "status" }, t("no_rows")));
    named();
  };
  fill(host, controls(rows, state, narrow), list, symbols(rows, data.bindings), panel);
  draw();
  open();
}

const placeOf = (row) => [row.stage, row.phase].filter(Boolean).join("/");
const keyOf = ({ tensor, at, dims }) => `${at}|${tensor}|${dims ?? ""}`;
const isApart = (row) => row.mask_fits === false || row.outcome === "unequal";
const mark = (row) => (isApart(row) ? "apart" : row.logical_shape === null && row.local_shape === null ? "lacking" : null);

// ------------------------------------------------------------------------------------------------------------------- controls

function controls(rows, state, narrow) {
  const options = (name) => [...new Set(rows.map((row) => row[name]).filter(Boolean))];
  const pick = (name) => h("label", null, t(name),
    h("select", { onchange: (event) => narrow({ [name]: event.target.value || null }) },
      h("option", { value: "" }, t("all")), options(name).map((one) => h("option", { value: one, selected: state[name] === one }, one))));
  const apart = rows.filter(isApart).length;
  const symbolic = state.as === "symbols";
  return h("div", { class: "controls" },
    search(state.find, (find) => narrow({ find }, { quietly: true })), pick("stage"), pick("kind"),
    h("label", null, h("input", { type: "checkbox", checked: state.mismatch === "1", onchange: (event) => narrow({ mismatch: event.target.checked ? "1" : null }) }),
      t("mismatches", { n: apart })),
    h("button", { type: "button", "aria-pressed": String(symbolic), onclick: (event) => {
      const on = event.target.getAttribute("aria-pressed") !== "true";
      event.target.setAttribute("aria-pressed", String(on));
      narrow({ as: on ? "symbols" : null });
    } }, t("as_symbols")));
}

// -------------------------------------------------------------------------------------------------------------------- columns

function columns({ beside, judged, tensors }, { as }) {
  const symbolic = as === "symbols";
  const whole = (row) => (symbolic ? named(row.dims) : sizes(row.logical_shape, row.logical_shape_min));
  const part = (row) => (symbolic && row.local_shape ? named(row.dims, row.placement) : sizes(row.local_shape, row.local_shape_min));
  return [
    { name: "place", title: t("stage"), cell: (row) => h("span", { "data-key": keyOf({ at: row.place, tensor: row.tensor_name, dims: row.dims }), "data-stage": row.stage }, row.stage, row.phase ? h("span", { class: "note" }, `/${row.phase}`) : null) },
    { name: "tensor_name", title: t("tensor"), cell: (row) => h("b", null, row.tensor_name) },
    { name: "logical_shape", title: t("logical_shape"), form: "shape", cell: whole },
    ...(beside ? [{ name: "planned_logical", title: t("planned_shape"), cell: (row) => side(row, "logical_shape") }] : []),
    { name: "local_shape", title: t("local_shape"), form: "shape", cell: part },
    ...(beside ? [{ name: "planned_local", title: t("planned_part"), cell: (row) => side(row, "local_shape") }] : []),
    ...(judged ? [{ name: "outcome", title: t("plan_and_run"), cell: outcome }] : []),
    { name: "mask", title: t("mask_broadcast"), cell: maskOf },
    { name: "owner_rank", title: t("owner_rank"), cell: (row) => (row.owner_rank === null ? ABSENT : [row.owner_rank, heldBy(row)]) },
    { name: "lifetime", title: t("lifetime") },
    { name: "bug", title: t("common_bug"), cell: (row) => bugOf(row, tensors) },
    { name: "dims", title: t("dims"), cell: (row) => (row.dims ? h("code", null, `[${row.dims}]`) : ABSENT) },
    { name: "dtype", title: t("dtype") }, { name: "bytes", title: t("bytes"), form: "bytes" }, { name: "kind", title: t("kind") },
    { name: "access", title: t("access") }, { name: "padding", title: t("padding") },
    { name: "mask_ratio", title: t("mask_ratio"), form: "percent" }, { name: "ranks", title: t("ranks"), form: "count" },
  ];
}

// Not searched: the bug of one tensor speaks of others.
function bugOf(row, tensors) {
  const said = say(own(tensors, row.tensor_name)?.common_bug);
  return said ? h("div", { class: "clamped", title: said }, said) : ABSENT;
}

const sizes = (most, least) => (most ? h("span", { class: "mono" }, shape(most, least)) : ABSENT);

// The dims in symbols, of a part with what each is divided by: `[B_prompt*G / dp, S_resp]`.
function named(dims, placement) {
  if (!dims) return ABSENT;
  const parts = split(dims);
  for (const one of placement ?? []) {
    const found = one.match(/^(\w+): Shard\((\d+)\)$/);
    if (found && parts[found[2]] !== undefined) parts[found[2]] = `${/[ +]/.test(parts[found[2]]) && !parts[found[2]].includes(" / ") ? `(${parts[found[2]]})` : parts[found[2]]} / ${found[1]}`;
  }
  return h("span", { class: "mono" }, `[${parts.join(", ")}]`);
}

// At commas that stand in no brackets.
function split(dims) {
  const parts = [""];
  let depth = 0;
  for (const char of dims) {
    depth += char === "(" ? 1 : char === ")" ? -1 : 0;
    if (char === "," && !depth) parts.push("");
    else parts[parts.length - 1] += char;
  }
  return parts.map((part) => part.trim());
}

// How many ranks hold it, where that is more than those that make up one copy of it.
function heldBy(row) {
  const owners = (row.owner_rank ?? "").split(",").reduce((sum, part) => {
    const found = part.match(/(\d+)-(\d+)(?::(\d+))?/);
    return sum + (found ? Math.floor((found[2] - found[1]) / (found[3] ?? 1)) + 1 : 1);
  }, 0);
  return row.held_by > owners ? h("div", { class: "note" }, t("held_by", { n: row.held_by })) : null;
}

function side(row, name) {
  if (!row.planned) return ABSENT;
  const forms = [...new Set(row.planned.map((one) => one[name] && shape(one[name])).filter(Boolean))];
  return forms.length ? forms.map((form) => h("div", null, h("span", { class: "mono" }, form))) : ABSENT;
}

function outcome(row) {
  if (!row.outcome) return ABSENT;
  const why = [...new Set(row.planned.flatMap((one) => one.why))];
  return h("div", { class: `outcome ${row.outcome}` }, sign({ unequal: "bad", equal: "good", explained: "good" }[row.outcome]), t(`outcome_${row.outcome}`),
    why.length ? h("div", { class: "note clamped", title: why.join("; ") }, why.join("; ")) : null);
}

function maskOf(row) {
  const along = row.broadcast ? h("span", { class: "note" }, t("repeats", { dim: row.broadcast })) : null;
  if (!row.mask && !along) return ABSENT;
  return h("div", null, row.mask ? [row.mask, " "] : null,
    row.mask_fits === false ? h("span", { class: "verdict fail" }, sign("bad"), t("misfit", { shape: row.mask_shape ? shape(row.mask_shape) : "?" })) : null, along);
}

const SIGNS = { good: "M3 8.5l3.5 3.5L13 4.5", bad: "M5 1h6l4 4v6l-4 4H5l-4-4V5zM5.5 5.5l5 5m0-5l-5 5" };

// Good, bad, or neither.
function sign(of) {
  return s("svg", { viewBox: "0 0 16 16", width: 14, height: 14, "aria-hidden": "true", class: `sign ${of ?? "neither"}` }, s("path", { d: SIGNS[of] ?? "M4 8h8" }));
}

// What the symbols stand for in this run.
function symbols(rows, bindings) {
  const used = new Set(rows.flatMap((row) => row.dims?.match(/[A-Za-z_]\w*/g) ?? []));
  const known = Object.entries(bindings).filter(([name]) => used.has(name));
  return known.length ? h("p", { class: "note" }, `${t("symbols_are")} `, known.map(([name, size]) => `${name} = ${size}`).join(" · ")) : null;
}

// ---------------------------------------------------------------------------------------------------------------- explanation

function explanation(state, rows, data, { close, show }) {
  const name = state.tensor;
  const known = own(data.tensors, name);
  const mine = rows.filter((row) => row.tensor_name === name);
  const row = mine.find((one) => keyOf({ at: one.place, tensor: one.tensor_name, dims: one.dims }) === keyOf(state));
  return h("aside", { class: "panel", "aria-label": name, onkeydown: (event) => { if (event.key === "Escape") close(); } },
    h("div", { class: "top" }, h("h3", { tabindex: -1 }, name), h("button", { type: "button", onclick: close }, t("close"))),
    known ? [h("p", null, say(known.purpose)), h("p", { class: "bug" }, h("b", null, t("common_bug"), ": "), say(known.common_bug))]
      : h("p", { class: "missing" }, t(mine.length ? "own_name" : "no_such_tensor", { name })),
    row ? thisRow(row) : null,
    mine.length ? [h("h4", null, t("in_stages")), h("ul", { class: "places" }, mine.map((one) => h("li", null,
      h("button", { type: "button", "aria-current": one === row ? "true" : null, onclick: () => show(one) }, one.place), " ",
      sizes(one.logical_shape, one.logical_shape_min), one.local_shape && String(one.local_shape) !== String(one.logical_shape) ? [" → ", sizes(one.local_shape, one.local_shape_min)] : null)))] : null,
    known ? [forms(known), life(known)] : null,
    h("p", null, h("a", { href: address("flow", { tensor: name }) }, t("flow")), " · ", h("a", { href: address("lifetimes", { tensor: name }) }, t("lifetimes")), " · ",
      h("a", { href: address("mesh", { tensor: name }) }, t("mesh"))));
}

function list(pairs) {
  return h("dl", { class: "facts" }, pairs.filter(([, value]) => value !== null && value !== undefined && value !== "" && value !== ABSENT)
    .map(([name, value]) => [h("dt", null, name), h("dd", null, value)]));
}

function thisRow(row) {
  const sides = row.planned ?? [];
  return [h("h4", null, row.place), list([
    [t("dims"), row.dims && h("code", null, `[${row.dims}]`)], [t("logical_shape"), sizes(row.logical_shape, row.logical_shape_min)],
    [t("local_shape"), sizes(row.local_shape, row.local_shape_min)], [t("placement"), row.placement?.join(", ")],
    ...sides.map((one) => [one.outcome ? t(`outcome_${one.outcome}`) : t("source_plan"), [
      one.name ? `${one.name} ` : null, one.logical_shape ? sizes(one.logical_shape) : null,
      one.local_shape && String(one.local_shape) !== String(one.logical_shape) ? [" → ", sizes(one.local_shape)] : null,
      one.why.length ? h("div", { class: "note" }, one.why.join("; ")) : null]]),
    [t("mask_broadcast"), maskOf(row)], [t("mask_ratio"), row.mask_ratio === null || row.mask_ratio === undefined ? null : percent(row.mask_ratio)],
    [t("padding"), row.padding], [t("dtype"), row.dtype], [t("bytes"), row.bytes === null || row.bytes === undefined ? null : `${bytes(row.bytes)} (${row.bytes})`], [t("kind"), row.kind],
    [t("access"), row.access], [t("owner_rank"), row.owner_rank && [row.owner_rank, heldBy(row)]], [t("lifetime"), row.lifetime], [t("owner"), row.owner],
  ])];
}

function forms({ forms: all }) {
  return [h("h4", null, t("forms")), h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": t("forms") }, h("table", null,
    h("thead", null, h("tr", null, ["form", "dims", "padding", "made_from"].map((name) => h("th", { scope: "col" }, t(name))))),
    h("tbody", null, all.map((one) => h("tr", null, h("td", null, one.form), h("td", null, h("code", null, one.shape)),
      h("td", null, written(one.padding === "none" ? null : one.padding)),
      h("td", null, written(one.source), one.broadcast ? h("div", { class: "note" }, t("repeats", { dim: one.broadcast })) : null))))))];
}

function life(known) {
  return [h("h4", null, t("life")), list([
    [t("made_by"), [known.producer, ...known.also_written_by].join(", ")], [t("read_by"), known.readers.join(", ")], [t("freed_by"), known.freed_by],
    [t("owner"), known.owner], [t("lifetime"), known.lifetime], [t("mask"), known.mask], [t("kind"), known.kind], [t("dtype"), known.dtype],
    [t("placement"), Object.entries(known.placement).map(([axis, cut]) => `${axis}: ${cut}`).join(", ")], [t("aliases"), known.aliases.join(", ")],
  ])];
}
