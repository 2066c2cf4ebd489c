// The flow of a step: a river of tensors through its stages, beside it what each tensor is.

import { fill, h } from "./dom.js";
import { look } from "./flow_card.js";
import { measurer, walked } from "./flow_columns.js";
import { laidOut } from "./flow_layout.js";
import { river } from "./flow_river.js";
import { card, formed, panel, spoken } from "./flow_words.js";
import { saved } from "./flow_save.js";
import { t } from "./words.js";

const LEAST = 1080; // pixels; in a narrower window the drawing is moved sideways
const before = { height: 0, focus: null }; // of the last drawing: what was chosen in it keeps the focus, and the page its place

export function drawFlow(host, shown) {
  const { data, asked, about, set } = shown;
  const ways = waysOf(shown);
  const chosen = { tensor: data.strands.some((one) => one.tensor_name === asked.tensor) ? asked.tensor : null, stage: asked.stage ?? null };
  const picked = data.strands.find((one) => one.tensor_name === chosen.tensor);
  const scroll = h("div", { class: "scroll river", style: { minHeight: `${before.height}px` } });
  const tip = h("div", { class: "flow-card", role: "status", hidden: true });
  const beside = h("div", { class: "flow-beside" });
  fill(host, elsewhere(shown, ways), controls(shown, ways, () => saved(scroll.querySelector("svg"), `${about.run}-flow.svg`)),
    h("div", { class: picked ? "flow-page open" : "flow-page" }, scroll, beside), tip);
  const width = Math.max(LEAST, Math.floor(scroll.clientWidth || LEAST));
  const measure = measurer();
  const laid = laidOut(data, {
    width, measure, afterwards: t("flow_after"), heading: (column) => column.phase ?? column.stage ?? "·",
    label: (strand, piece, number) => [strand.tensor_name, firstForm(strand, piece, ways)],
    form: (strand, use) => formed(strand.uses[use], ways),
  });
  const on = {
    choose: (tensor) => { before.focus = ["tensor", tensor]; set({ tensor: chosen.tensor === tensor ? null : tensor, stage: null }); },
    stage: (stage) => { before.focus = ["stage", stage]; set({ stage: chosen.stage === stage ? null : stage, tensor: null }); },
    look: (strand, element, event) => strand.tensor_name !== chosen.tensor && look(tip, card(strand, data, ways), element, event),
    leave: () => { tip.hidden = true; },
  };
  const close = () => { before.focus = ["tensor", chosen.tensor]; set({ tensor: null }); };
  const drawn = laid.columns.at(-1).x + laid.columns.at(-1).width;
  fill(scroll, river(laid, data, { width: Math.max(width, drawn), said: (strand) => spoken(strand, data, ways), on, chosen, measure, label: t("flow_label", { strands: data.strands.length }) }));
  if (picked) fill(beside, panel(picked, data, ways, { step: data.step, onclose: close }));
  host.onkeydown = (event) => (event.key === "Escape" && picked ? close() : walked(event));
  settle(scroll, picked && laid.strands.find((one) => one.strand === picked));
}

// The page stays where it was, and what was chosen stays in view and in focus.
function settle(scroll, picked) {
  const svg = scroll.querySelector("svg");
  before.height = svg.getBoundingClientRect().height;
  scroll.style.minHeight = "";
  const x = picked?.pieces[0]?.x0 ?? 0;
  if (x > scroll.clientWidth * 0.7) scroll.scrollLeft = x - scroll.clientWidth * 0.3;
  const [what, name] = before.focus ?? [];
  [...svg.querySelectorAll(`[data-${what ?? "none"}]`)].find((one) => one.dataset[what] === name)?.focus({ preventScroll: true });
  before.focus = null;
}

// What is switched on: symbols or numbers, logical or local, and of which rank.
function waysOf({ data, asked }) {
  const local = asked.shape === "local";
  const rank = data.ranks.find((one) => one.ranks.map(String).includes(asked.rank)) ?? data.ranks[0];
  return { local, dims: local || asked.dims === "numbers" ? "numbers" : "symbols", rank: rank ? String(rank.rank) : null };
}

// Whether a rank was asked for of which this file holds nothing.
function elsewhere({ data, asked, live }, { local, rank }) {
  if (!local || asked.rank === undefined || data.ranks.some((one) => one.ranks.map(String).includes(asked.rank))) return null;
  return h("p", { class: "missing" }, t(live ? "not_in_run" : "not_in_file", { there: `${t("rank")} ${rank}` }));
}

function controls({ data, asked, choice, choices, set }, ways, save) {
  const either = (name, legend, options, now) => h("fieldset", { class: "either" }, h("legend", null, legend),
    options.map(([value, title, off]) => h("label", null,
      h("input", { type: "radio", name: `flow-${name}`, value, checked: now === value, disabled: off, onchange: () => set({ [name]: value }) }), title)));
  const steps = [...new Set(choices.map((one) => one.step).filter((one) => one !== undefined))].sort((a, b) => a - b);
  return h("div", { class: "controls" },
    either("dims", t("flow_dims"), [["symbols", t("flow_symbols"), ways.local], ["numbers", t("flow_numbers")]], ways.dims),
    either("shape", t("flow_shape"), [["logical", t("flow_logical")], ["local", t("flow_local")]], ways.local ? "local" : "logical"),
    ways.local && data.ranks.length > 0 && h("label", null, t("rank"), h("select", { onchange: (event) => set({ rank: event.target.value }) },
      data.ranks.map((one) => h("option", { value: String(one.rank), selected: ways.rank === String(one.rank) }, rankTitle(one))))),
    steps.length > 1 && h("label", null, t("step"), h("select", { onchange: (event) => set({ step: event.target.value }) },
      steps.map((step) => h("option", { value: step, selected: choice.step === step }, step)))),
    asked.stage && h("button", { type: "button", onclick: () => set({ stage: null }) }, t("flow_all_stages")),
    h("button", { type: "button", class: "save", onclick: save }, t("flow_save")));
}

function rankTitle({ rank, ranks, count }) {
  const others = ranks.length > 1 ? ranks.slice(1).join(", ") : "";
  if (others) return t("flow_rank_like", { rank, others });
  return count > 1 ? t("flow_rank_class", { rank, count }) : String(rank);
}

function firstForm(strand, piece, ways) {
  const use = piece.made[0]?.[1] ?? strand.uses.findIndex((one) => one.access?.includes("read"));
  return use === null || use < 0 ? "" : formed(strand.uses[use], ways);
}
