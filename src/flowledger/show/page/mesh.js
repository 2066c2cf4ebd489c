// The mesh: the ranks as a grid by axis, how much each did, which part of a tensor it holds, and where a sample travelled.

import { fill, h } from "./dom.js";
import { count } from "./forms.js";
import { drawGrid, position } from "./mesh_grid.js";
import { FORM, HEATS, heatOf } from "./mesh_heat.js";
import { pick } from "./mesh_pick.js";
import { drawSquares } from "./mesh_squares.js";
import { drawTensor } from "./mesh_tensor.js";
import { drawWay } from "./mesh_way.js";
import { part } from "./store.js";
import { say, t } from "./words.js";

const DENSE = ["pp", "dp", "cp", "sp", "tp"];
const kept = { focus: null }; // what had the focus before the view was drawn anew

export async function drawMesh(host, shown) {
  const { data, asked } = shown;
  const step = await stepOf(shown);
  if (step !== null) return shown.set({ step }, { quietly: true });
  const set = (more, focus) => { kept.focus = focus ?? null; shown.set(more); };
  const axes = sides(data, asked);
  const heat = heatOf(data, asked) ?? heatOf(data, { ...asked, heat: null });  // what is not known is not shown
  const sample = data.samples.find((one) => one.sample_id === asked.sample) ?? null;
  const tensor = chosenTensor(data, asked);
  const rank = chosenRank(data, asked);
  const state = { data, asked, set, axes, heat, sample, tensor, rank };
  fill(host,
    controls(shown, state),
    h("h3", null, t("mesh_ranks", { count: count(data.size) })),
    heat ? h("p", { class: "note" }, heat.says) : null,
    h("div", { class: "mesh-beside" }, drawGrid(state),
      rank === null ? h("p", { class: "note mesh-hint" }, t("mesh_pick_rank")) : held(state)),
    data.classes ? drawSquares(state) : null,
    h("h3", null, t("mesh_tensor")), drawTensor(state),
    h("h3", null, t("mesh_way")), drawWay(state));
  if (kept.focus) host.querySelector(`[data-focus="${CSS.escape(kept.focus)}"]`)?.focus({ preventScroll: true });
  kept.focus = null;
}

// Of a sample that a link names without its step: the step in which this file has it, where that is another one; else null.
async function stepOf({ asked, choices, data, live }) {
  const has = ({ samples }) => samples?.some((one) => one.sample_id === asked.sample);
  if (live || !asked.sample || asked.step || has(data)) return null;
  for (const { step } of choices) if (step && has((await part("mesh", { step })).data)) return step;
  return null;
}

// Which axes go across and down: those asked for, else the two longest. `rest`: what the panels differ in.
function sides(data, asked) {
  const apart = data.axes.filter(({ axis }) => new Set(data.cells.map((cell) => cell.at[axis][1])).size > 1);
  const known = apart.map(({ axis }) => axis);
  const longest = apart.filter(({ axis }) => DENSE.includes(axis)).sort((a, b) => b.degree - a.degree).map(({ axis }) => axis);
  const across = known.includes(asked.across) ? asked.across : (longest.find((axis) => axis !== asked.down) ?? null);
  const down = known.includes(asked.down) && asked.down !== across ? asked.down : (longest.find((axis) => axis !== across) ?? null);
  const chosen = [across, down];
  const dense = chosen.every((axis) => axis === null || DENSE.includes(axis));
  const counting = dense ? DENSE : data.folded ? ["pp", "edp", "ep", "etp"] : ["pp", "edp", "ep", "cp", "sp", "tp"];
  return { known, across, down, rest: known.filter((axis) => counting.includes(axis) && !chosen.includes(axis)) };
}

function chosenRank(data, asked) {
  if (!/^\d+$/.test(asked.rank ?? "")) return null;
  const rank = Number(asked.rank);
  return rank < data.size ? rank : null;
}

// The entry that a link names by tensor and place; else the first of that tensor; else one that is cut along most axes.
function chosenTensor(data, asked) {
  const named = data.tensors.filter((entry) => entry.tensor_name === asked.tensor);
  const listed = named.length ? named : data.tensors;
  const exact = named.filter((entry) => entry.at === asked.at || entry.also.includes(asked.at));
  const telling = (entry) => (entry.law ? entry.cut.length * 10 + Math.min(entry.logical_shape.length, 3)
    + 5 * [entry.at, ...entry.also].some((at) => at.startsWith("update_actor")) : -1);
  const best = (entries) => entries.reduce((a, b) => (telling(b) > telling(a) ? b : a), entries[0]);
  return exact.find((entry) => `${entry.dims}` === asked.form) ?? exact[0] ?? (listed.length ? best(listed) : null);
}

function controls(shown, { data, set, axes, heat, rank }) {
  const steps = [...new Set(shown.choices.map((choice) => choice.step).filter(Boolean))].sort((a, b) => a - b);
  const axis = (side) => pick(t(`mesh_${side}`), `mesh-${side}`, axes.known.map((name) => [name, name]), axes[side],
    (value) => set(value === axes[side === "across" ? "down" : "across"] ? { across: axes.down, down: axes.across } : { [side]: value }, `mesh-${side}`));
  const heats = HEATS.filter((name) => data.heat[name]).map((name) => [name, t(`mesh_heat_${name}`)]);
  const stages = heat ? Object.keys(data.heat[heat.name]).map((stage) => [stage, stage || t("mesh_all_stages")]) : [];
  return h("div", { class: "controls" },
    steps.length > 1 ? pick(t("step"), "mesh-step", steps.map((step) => [step, step]), String(data.step), (step) => set({ step }, "mesh-step")) : null,
    heats.length ? pick(t("mesh_heat"), "mesh-heat", heats, heat.name, (name) => set({ heat: name, stage: null }, "mesh-heat")) : null,
    stages.length > 1 ? pick(t("stage"), "mesh-stage", stages, heat.stage, (stage) => set({ stage }, "mesh-stage")) : null,
    axes.known.length > 1 ? [axis("across"), axis("down")] : null,
    data.size > 1 ? h("label", null, t("rank"), h("input", {
      type: "number", min: 0, max: data.size - 1, value: rank ?? "", "data-focus": "mesh-rank", style: { width: "6rem" },
      onchange: ({ target }) => {
        if (!target.value || chosenRank(data, { rank: target.value }) !== null) set({ rank: target.value }, "mesh-rank");
        else target.value = rank ?? "";
      },
    })) : null);
}

// What the chosen rank has, in words: the same as its cell, in full.
function held({ data, rank, heat }) {
  const cell = position(data, rank).cell;
  const one = (name) => cell[name] && h("div", null, h("dt", null, t(`mesh_${name}`)), h("dd", null, told(cell[name])));
  const places = data.axes.map(({ axis }) => `${axis} ${position(data, rank).at(axis)}`).join(" · ");
  const numbers = HEATS.flatMap((name) => {
    const found = heatOf(data, { heat: name, stage: heat?.name === name ? heat.stage : undefined });
    const value = found?.numbers[rank];
    return value === null || value === undefined ? [] : [h("div", null,
      h("dt", null, found.stage ? `${t(`mesh_heat_${name}`)} · ${found.stage}` : t(`mesh_heat_${name}`)), h("dd", null, FORM[name](value)))];
  });
  return h("dl", { class: "mesh-held", "aria-live": "polite" },
    h("div", null, h("dt", null, t("rank")), h("dd", null, places ? `${rank} · ${places}` : rank)),
    ["layers", "heads", "kv_heads", "experts", "samples"].map(one),
    cell.host ? h("div", null, h("dt", null, t("mesh_host")), h("dd", null, `${cell.host} · ${cell.device ?? ""}`)) : null,
    cell.name ? h("div", null, h("dt", null, t("mesh_class")), h("dd", null, `${cell.name} ×${count(cell.count)}`)) : null,
    numbers,
    data.dealing ? h("p", { class: "note" }, say(data.dealing)) : null);
}

function told({ count: many, which }) {
  return which === null ? t("mesh_each", { count: count(many) }) : `${which} (${count(many)})`;
}
