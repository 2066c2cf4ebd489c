// The way of one sample over the ranks: who sampled it, scored it, trained on it, and on which of its tokens.

import { h } from "./dom.js";
import { ABSENT, count, number } from "./forms.js";
import { address } from "./link.js";
import { own } from "./own.js";
import { say, t } from "./words.js";

const DID = ["prompt", "rollout", "reward"];

// What a sample met on these ranks, a line each.
export function stops(sample, ranks) {
  const here = (hop) => hop.ranks.some((rank) => ranks.includes(rank));
  const done = sample.hops.filter((hop) => DID.includes(hop.stage) && here(hop)).map((hop) => t(`mesh_did_${hop.stage}`));
  if (sample.dropped_reason && sample.hops.some((hop) => hop.stage === "filter" && here(hop))) done.push(t("mesh_did_drop"));
  const trained = sample.trained.filter((part) => ranks.includes(part.rank)).map(position);
  return [done.join(" → "), [...new Set(trained)].join(", ")].filter(Boolean);
}

function position(part) {
  return `${t("mesh_did_update")} e${part.epoch} m${part.mini_batch} µ${part.micro_batch}`;
}

export function drawWay({ data, asked, set, sample }) {
  if (!data.samples.length) return h("p", { class: "note" }, t("mesh_no_samples"));
  const options = data.samples.map((one) => h("option", { value: one.sample_id, selected: one.sample_id === asked.sample },
    `${one.sample_id} · ${t("mesh_reward")} ${one.reward === null ? ABSENT : number(one.reward)} · ${count((one.prompt_length ?? 0) + (one.response_length ?? 0))} ${t("mesh_tokens")}`));
  const pick = h("label", null, t("sample"), h("select", { "data-focus": "mesh-sample", onchange: (event) => set({ sample: event.target.value }, "mesh-sample") },
    h("option", { value: "" }, t("mesh_pick_sample")), options));
  return h("div", null, h("div", { class: "controls" }, pick,
    sample ? h("a", { href: address("sample", { sample: sample.sample_id }) }, t("mesh_passport")) : null),
  data.others ? h("p", { class: "note" }, say(data.others)) : null,
  sample ? way(sample, data) : asked.sample ? h("p", { class: "missing" }, t("mesh_sample_elsewhere", { sample: asked.sample, step: data.step })) : null);
}

// A line for each stage, in the order of the step: which ranks, and what they learnt of it.
function way(sample, data) {
  const rows = sample.hops.map((hop) => h("tr", null,
    h("td", null, hop.stage), h("td", { class: "numeric" }, hop.ranks.join(", ") || ABSENT), h("td", null, learnt(sample, hop, data))));
  return h("div", { class: "scroll" }, h("table", null,
    h("caption", { class: "unseen" }, t("mesh_way")),
    h("thead", null, h("tr", null, [t("stage"), t("mesh_on_ranks"), t("mesh_learnt")].map((title) => h("th", { scope: "col" }, title)))),
    h("tbody", null, rows)));
}

const along = (steps, rank) => steps.reduce((place, [stride, degree]) => place * degree + (Math.floor(rank / stride) % degree), 0);

function learnt(sample, { stage }, data) {
  const told = own({
    prompt: [["prompt_length", sample.prompt_length]],
    rollout: [["response_length", sample.response_length], ["finish_reason", sample.finish_reason]],
    reward: [["reward", sample.reward]], filter: [["dropped_reason", sample.dropped_reason]], advantage: [["advantage", sample.advantage]],
  }, stage) ?? [];
  const values = told.filter(([, value]) => value !== null && value !== undefined)
    .map(([name, value]) => `${t(`mesh_${name}`)} ${typeof value === "number" ? number(value) : value}`).join(", ");
  if (!stage.startsWith("update_")) return values || ABSENT;
  return sample.trained.map((part) => h("div", null, [
    `${t("rank")} ${part.rank}: ${t("mesh_epoch")} ${part.epoch}, ${t("mesh_mini_batch")} ${part.mini_batch}, ${t("mesh_micro_batch")} ${part.micro_batch}`,
    part.tokens ? `${t("mesh_tokens")} ${part.tokens.map(([start, stop]) => `${start}–${stop - 1}`).join(", ")}`
      : part.stop > part.start ? `${t("mesh_tokens")} ${part.start}–${part.stop - 1}` : "",
    data.axes.filter(({ axis }) => axis === "cp" || axis === "sp").map(({ axis, steps }) => `${axis} ${along(steps, part.rank)}`).join(" "),
  ].filter(Boolean).join(" · ")));
}
