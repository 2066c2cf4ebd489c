// The passport of one sample: what it is, where it went, its tokens with all that was made of each, its group.

import { fill, h } from "./dom.js";
import { ABSENT, count, number, seconds, written } from "./forms.js";
import { address } from "./link.js";
import { own } from "./own.js";
import { drawGroup } from "./sample_group.js";
import { drawPicker } from "./sample_picker.js";
import { drawStrip } from "./sample_strip.js";
import { say, t } from "./words.js";

export async function drawSample(host, shown) {
  const { data, choices, live } = shown;
  const held = new Set(choices.map((choice) => choice.sample));
  // A link to a sample that this page holds; what it does not hold is named, with the command that shows it.
  const goes = (id) => (live || held.has(id) ? { href: address("sample", { sample: id }) } : null);
  const picker = await drawPicker(shown, goes);
  if (!data.sample) return void fill(host, picker);
  fill(host,
    picker,
    data.why ? h("p", { class: "note", id: "sample-why" }, say(data.why)) : null,
    h("div", { class: "sample-head" }, facts(shown), hops(data)),
    data.strip.count ? [h("h3", null, t("sample_tokens", { count: count(data.strip.count) })), drawStrip(shown)] : null,
    data.texts.map(piece),
    data.group.length > 1 ? [h("h3", null, t("sample_group", { group: data.sample.group_id })), drawGroup(data, goes, shown.about.run)] : null,
    h("h3", null, t("sample_stages")), stages(data));
}

function facts({ data }) {
  const { sample } = data;
  const line = (name, value, form) => (value === null || value === undefined ? null
    : h("div", null, h("dt", null, t(name)), h("dd", null, typeof value === "object" && !form ? written(value) : form ? form(value) : String(value))));
  return h("dl", { class: "mesh-held", "data-sample": sample.sample_id },
    line("sample", sample.sample_id), line("sample_group_id", sample.group_id), line("step", sample.step),
    line("mesh_reward", sample.reward, number), parts(sample.rewards), line("mesh_advantage", sample.advantage, number),
    line("mesh_prompt_length", sample.prompt_length, count), line("mesh_response_length", sample.response_length, count),
    line("mesh_finish_reason", sample.finish_reason), line("sample_versions", sample.versions, (list) => list.join(", ")),
    sample.dropped_reason ? line("sample_dropped", sample.dropped_reason) : null,
    data.hops.some((hop) => hop.ranks.length) ? h("div", null, h("dt", null, t("sample_on_mesh")), h("dd", null,
      h("a", { href: address("mesh", { sample: sample.sample_id, step: sample.step }) }, t("sample_follow")))) : null);
}

// A prompt or a response that came in one piece. Lines stay lines; all else that is not seen is shown.
function piece({ position, text, left_out: rest }) {
  const shown = text.replace(/[\p{C}\p{Zl}\p{Zp}]/gu, (sign) => (sign === "\n" || sign === "\t" ? sign : "�"));
  return [h("h3", null, t(position === 0 ? "sample_is_prompt" : "sample_is_response")),
    h("pre", { class: "sample-piece", dir: "auto", tabindex: 0 }, shown), rest ? h("p", { class: "note" }, t("sample_more_text", { count: count(rest) })) : null];
}

// The parts of a reward, where there are several.
function parts(rewards) {
  const named = Object.entries(rewards ?? {});
  if (named.length < 2) return null;
  return h("div", null, h("dt", null, t("sample_rewards")),
    h("dd", null, named.map(([name, value]) => `${name} ${value === null ? ABSENT : number(value)}`).join(" · ")));
}

// The stages in a row: how long each took, and on which ranks.
function hops({ hops: all }) {
  const whole = all.filter((hop) => hop.phase === null);
  const longest = Math.max(...whole.map((hop) => hop.latency_ms ?? 0), 1e-9);
  return h("ol", { class: "sample-hops", "aria-label": t("sample_stages") }, whole.map((hop) => h("li", null,
    h("span", { class: "sample-hop" }, hop.stage),
    h("span", { class: "sample-took" }, hop.latency_ms === null ? ABSENT : seconds(hop.latency_ms / 1e3)),
    hop.latency_ms === null ? null : h("span", { class: "sample-bar" }, h("span", { style: { width: `${Math.max(1, (100 * (hop.latency_ms ?? 0)) / longest)}%` } })),
    hop.ranks.length ? h("span", { class: "sample-ranks" }, t("sample_ranks", { ranks: few(hop.ranks) })) : null)));
}

const few = (ranks) => (ranks.length > 4 ? `${ranks.slice(0, 4).join(", ")}, … (${ranks.length})` : ranks.join(", "));

// Every hop in full: what it read, wrote and taught. The same as `flowledger sample RUN ID`.
function stages({ hops: all, trained }) {
  const names = (hop, access) => hop.tensors.filter((tensor) => tensor.access === access && tensor.slice !== null && !IDENTITY.includes(tensor.tensor_name))
    .map((tensor) => (tensor.slice.length ? `${tensor.tensor_name} [${tensor.slice.join(", ")}]` : tensor.tensor_name)).join(", ");
  const cell = (text, more) => h("td", { class: text === ABSENT ? "absent" : null, ...more }, text);
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": t("sample_stages") }, h("table", { class: "sample-stages" },
    h("thead", null, h("tr", null, ["stage", "sample_at", "sample_took", "mesh_on_ranks", "sample_read", "sample_written", "mesh_learnt"]
      .map((key) => h("th", { scope: "col" }, t(key))))),
    h("tbody", null, all.map((hop) => h("tr", null,
      h("th", { scope: "row", class: hop.phase ? "sample-phase" : null }, hop.phase ?? hop.stage),
      cell(hop.at_ms === null ? ABSENT : seconds(hop.at_ms / 1e3), { class: "numeric" }),
      cell(hop.latency_ms === null ? ABSENT : seconds(hop.latency_ms / 1e3), { class: "numeric" }),
      cell(hop.phase ? ABSENT : few(hop.ranks) || ABSENT), cell(names(hop, "read") || ABSENT), cell(names(hop, "write") || ABSENT),
      h("td", null, learnt(hop, trained)))))));
}

const IDENTITY = ["sample_id", "group_id"];

function learnt(hop, trained) {
  const lines = Object.entries(hop.values).filter(([name]) => name !== "trained")
    .map(([name, value]) => `${own(KNOWN, name) ? t(KNOWN[name]) : name} ${written(value)}`);
  if (hop.values.trained) {
    for (const part of trained) {
      const tokens = part.tokens ?? (part.stop > part.start ? [[part.start, part.stop]] : []);
      lines.push(`${t("rank")} ${part.rank}: ${t("mesh_epoch")} ${part.epoch}, ${t("mesh_mini_batch")} ${part.mini_batch}, ${t("mesh_micro_batch")} ${part.micro_batch}`
        + (tokens.length ? ` · ${t("mesh_tokens")} ${tokens.map(([start, stop]) => `${start}–${stop - 1}`).join(", ")}` : ""));
    }
  }
  return lines.length ? lines.map((line) => h("div", null, line)) : ABSENT;
}

const KNOWN = {
  group_id: "sample_group_id", prompt_length: "mesh_prompt_length", response_length: "mesh_response_length", finish_reason: "mesh_finish_reason",
  versions: "sample_versions", rewards: "sample_rewards", reward: "mesh_reward", dropped_reason: "sample_dropped", advantage: "mesh_advantage",
};
