// The tokens of a sample as a strip: positions on top, text, masks that nest, and a row of numbers for all that was made of each token.

import { fill, h, s } from "./dom.js";
import { ABSENT, count, number, visible } from "./forms.js";
import { address } from "./link.js";
import { rowsOf, short, tint } from "./sample_rows.js";
import { t } from "./words.js";

const WIDE = 46, SIDE = 118, ROW = 17, LINES = 4, MASK = 15, TOP = 124;
const MASKS = ["attention_mask", "response_mask", "loss_mask"];

export function drawStrip({ view, data, asked }) {
  const { columns } = data.strip;
  const all = columns.position.length, rows = rowsOf(data.strip);
  const per = Math.max(4, Math.min(all, Math.floor(((document.getElementById("sample")?.clientWidth || 1200) - SIDE - 4) / WIDE)));
  const window_ = per * LINES;
  const named = columns.position.indexOf(Number(asked.token));
  const state = { at: named, start: named < 0 ? 0 : Math.floor(named / window_) * window_ };
  const lines = h("div", { class: "sample-lines", role: "listbox", "aria-label": t("sample_strip_label"), "aria-orientation": "horizontal" });
  const panel = h("div", { class: "sample-panel", role: "status" });
  const map = all > window_ ? overview(data.strip, window_, (start) => { state.start = start; redraw(); }) : null;

  function redraw() {
    const made = [];
    for (let from = state.start; from < Math.min(all, state.start + window_); from += per) {
      made.push(line(data.strip, rows, from, Math.min(all, from + per), per, state.at));
    }
    fill(lines, made);
    map?.mark(state.start);
    mark();
  }
  function mark() {
    for (const one of lines.querySelectorAll(".sample-token")) {
      const chosen = Number(one.dataset.at) === state.at;
      one.classList.toggle("chosen", chosen);
      one.setAttribute("aria-selected", String(chosen));
      one.setAttribute("tabindex", chosen || (state.at < 0 && Number(one.dataset.at) === state.start) ? 0 : -1);
    }
    panel.classList.toggle("chosen", state.at >= 0);
    fill(panel, state.at < 0 ? h("p", { class: "note" }, t("sample_point")) : token(data.strip, rows, state.at));
  }
  function choose(at, { focus = true } = {}) {
    state.at = Math.max(0, Math.min(all - 1, at));
    const start = Math.floor(state.at / window_) * window_;
    asked.token = String(columns.position[state.at]);
    history.replaceState(null, "", address(view, asked));  // the view stays as it is: only what is told of the token changes
    if (start !== state.start) { state.start = start; redraw(); } else mark();
    if (focus) lines.querySelector(`[data-at="${state.at}"]`)?.focus({ preventScroll: true });
  }
  function leave() {
    state.at = -1;
    delete asked.token;
    history.replaceState(null, "", address(view, asked));
    mark();
  }
  const of = (event) => event.target.closest?.(".sample-token");
  lines.addEventListener("click", (event) => {
    const at = Number(of(event)?.dataset.at ?? -1);
    if (at >= 0) (at === state.at ? leave : choose)(at);
  });
  lines.addEventListener("pointerover", (event) => { if (of(event)) fill(panel, token(data.strip, rows, Number(of(event).dataset.at))); });
  lines.addEventListener("pointerleave", mark);
  lines.addEventListener("keydown", (event) => {
    if (event.key === "Escape") leave();
    const now = Math.max(0, state.at);
    const to = { ArrowRight: now + 1, ArrowLeft: now - 1, ArrowDown: now + per, ArrowUp: now - per, Home: 0, End: all - 1,
      PageDown: now + window_, PageUp: now - window_, Enter: Number(of(event)?.dataset.at ?? now), " ": Number(of(event)?.dataset.at ?? now) }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    choose(to);
  });
  redraw();
  return h("div", { class: "sample-strip" }, map?.element ?? null, h("div", { class: "scroll" }, lines), panel, legend(data.strip, rows));
}

// One line of the strip: tokens [from, to).
function line({ columns, count: whole }, rows, from, to, per, chosen) {
  const height = TOP + rows.length * ROW + 8;
  const label = (text, y, more) => s("text", { x: SIDE - 8, y, class: "sample-label", ...more }, text);
  const heads = [label(t("sample_position"), 32), label(t("sample_text"), 52), label(t("sample_token_id"), 68),
    ...MASKS.map((name, nth) => label(t("sample_mask_row", { mask: t(`sample_${name}`) }), 85 + nth * MASK)), ...rows.map((row, at) => label(t(`sample_row_${row.name}`), TOP + at * ROW + 13))];
  const tokens = [];
  for (let at = from; at < to; at += 1) tokens.push(column(columns, rows, at, SIDE + (at - from) * WIDE, height, at === chosen));
  return s("svg", { class: "sample-line", width: SIDE + Math.min(per, whole) * WIDE + 4, height, role: "presentation" },
    regions(columns, from, to), heads, tokens);
}

// Above the tokens: whose they are.
function regions(columns, from, to) {
  const kind = (at) => (columns.attention_mask && !columns.attention_mask[at] ? "padding"
    : columns.response_mask?.[at] ? "response" : at > first(columns) ? "environment" : "prompt");
  const made = [];
  for (let at = from; at < to;) {
    let end = at;
    while (end < to && kind(end) === kind(at)) end += 1;
    const x = SIDE + (at - from) * WIDE;
    made.push(s("path", { d: `M${x + 1},18 V14 H${x + (end - at) * WIDE - 1} V18`, class: `sample-region ${kind(at)}` }),
      s("text", { x: x + 2, y: 10, class: "sample-region" }, (end - at) * WIDE > 80 ? t(`sample_is_${kind(at)}`) : ""));
    at = end;
  }
  return made;
}

function first(columns) {
  const found = (columns.response_mask ?? []).findIndex(Boolean);
  return found < 0 ? Infinity : found;
}

function column(columns, rows, at, x, height, chosen) {
  const inLoss = columns.loss_mask ? Boolean(columns.loss_mask[at]) : true;
  const text = columns.text?.[at] ?? null;
  const centre = x + WIDE / 2;
  const says = [`${t("sample_position")} ${columns.position[at]}`, text === null ? "" : visible(text), inLoss ? "" : t("sample_not_in_loss")].filter(Boolean).join(", ");
  return s("g", {
    class: `sample-token${inLoss ? "" : " masked"}${chosen ? " chosen" : ""}`, role: "option", "aria-label": says, "data-at": at, "aria-selected": String(chosen), tabindex: -1,
  },
  s("rect", { x: x + 0.5, y: 20, width: WIDE - 1, height: height - 22, class: "sample-hit", rx: 3 }),
  s("text", { x: centre, y: 32, class: "sample-position" }, columns.position[at]),
  s("text", { x: centre, y: 52, class: "sample-text" }, text === null ? ABSENT : clipped(visible(text))),
  s("text", { x: centre, y: 68, class: "sample-id" }, columns.token_id?.[at] ?? ABSENT),
  MASKS.map((name, nth) => s("rect", { x: x + 1, y: 77 + nth * MASK, width: WIDE - 2, height: 8, class: `sample-mask ${columns[name]?.[at] ? name : "off"}` })),
  rows.map((row, nth) => cell(row, row.values[at], columns, at, x, TOP + nth * ROW)));
}

function cell(row, value, columns, at, x, y) {
  if (value === null || value === undefined) return s("text", { x: x + WIDE / 2, y: y + 12, class: "sample-none" }, ABSENT);
  const colour = tint(row, value);
  const mark = row.name === "ratio" && columns.clipped?.[at] ? "*" : "";
  return [
    colour && s("rect", { x: x + 1, y: y + 0.5, width: WIDE - 2, height: ROW - 1, class: colour.class, style: { fillOpacity: colour.alpha } }),
    s("text", { x: x + WIDE / 2, y: y + 12, class: "sample-value" }, short(value) + mark),
  ];
}

// By what is seen, not by code units: a wide sign counts twice.
function clipped(text) {
  const signs = [...text].slice(0, 8);
  const wide = (sign) => (sign.codePointAt(0) > 0x2e80 ? 2 : 1);
  if (signs.length === [...text.slice(0, 40)].length && signs.reduce((sum, sign) => sum + wide(sign), 0) <= 6) return text;
  let room = 5, kept = "";
  for (const sign of signs) {
    room -= wide(sign);
    if (room < 0) break;
    kept += sign;
  }
  return `${kept}…`;
}

// All that is known of one token.
function token({ columns }, rows, at) {
  const text = columns.text?.[at] ?? null;
  const codes = text === null ? "" : [...text].slice(0, 12).map((sign) => `U+${sign.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`).join(" ");
  const line = (name, value) => h("div", null, h("dt", null, name), h("dd", null, value));
  const masks = MASKS.filter((name) => columns[name]).map((name) => `${t(`sample_${name}`)} ${columns[name][at] ? 1 : 0}`).join(" · ");
  return h("dl", { class: "mesh-held", "data-token": columns.position[at] },
    line(t("sample_position"), columns.position[at]), columns.token_id ? line(t("sample_token_id"), columns.token_id[at] ?? ABSENT) : null,
    text === null ? null : line(t("sample_text"), h("bdi", { class: "mono sample-full", title: codes }, visible(text).slice(0, 400) || "″″")),
    codes ? line(t("sample_codes"), h("span", { class: "mono" }, codes)) : null,
    line(t("sample_masks"), masks),
    rows.filter((row) => row.values[at] !== null).map((row) => line(t(`sample_row_${row.name}`), number(row.values[at]))),
    columns.clipped?.[at] ? line(t("sample_clipped"), t("sample_clipped_yes")) : null);
}

// What the rows mean, once beneath the strip.
function legend({ columns }, rows) {
  const listed = rows.map((row) => h("div", null, h("dt", null, t(`sample_row_${row.name}`)), h("dd", null, t(`sample_means_${row.name}`))));
  return h("details", { class: "sample-legend" }, h("summary", null, t("sample_legend")),
    h("p", { class: "note" }, t("sample_legend_masks"), columns.clipped ? ` ${t("sample_legend_clipped")}` : ""), h("dl", null, listed));
}

// A long sample as a whole: a thin line for each token, the part that is shown framed.
function overview({ columns, gaps }, window_, go) {
  const all = columns.position.length, width = 1200, height = 34;
  const shown = gaps.new_old ?? gaps.old_rollout ?? gaps.new_rollout ?? columns.loss_share ?? columns.rollout_log_prob ?? null;
  const most = Math.max(1e-9, ...(shown ?? []).map((value) => Math.abs(value ?? 0)));
  const each = width / all;
  const bars = columns.position.map((_, at) => {
    const tall = shown && shown[at] !== null ? Math.max(2, (Math.abs(shown[at]) / most) * (height - 8)) : 2;
    return s("rect", { x: at * each, y: height - tall, width: Math.max(0.6, each - 0.2), height: tall, class: columns.loss_mask?.[at] ? "sample-tick" : "sample-tick masked" });
  });
  const frame = s("rect", { x: 0, y: 0.5, width: window_ * each, height: height - 1, class: "sample-frame" });
  const buttons = (way, text) => h("button", { type: "button", onclick: () => go(Math.max(0, Math.min(Math.floor((all - 1) / window_) * window_, start + way * window_))) }, text);
  let start = 0;
  const told = h("span", { class: "note", role: "status" });
  const svg = s("svg", { class: "sample-map", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": t("sample_map"),
    onclick: (event) => {
      const box = svg.getBoundingClientRect();
      go(Math.floor((((event.clientX - box.left) / box.width) * all) / window_) * window_);
    } }, bars, frame);
  return {
    element: h("div", { class: "sample-overview" }, svg, h("div", { class: "controls" }, buttons(-1, t("sample_before")), buttons(1, t("sample_after")), told)),
    mark(at) {
      start = at;
      frame.setAttribute("x", at * each);
      told.textContent = t("sample_window", { from: count(columns.position[at]), to: count(columns.position[Math.min(all, at + window_) - 1]), all: count(all) });
    },
  };
}
