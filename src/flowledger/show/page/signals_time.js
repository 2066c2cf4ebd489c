// Where the time of one step went: a row a rank, stages in their colours, lighter where it waited, a dark line where collectives ran.

import { chart } from "./chart.js";
import { h } from "./dom.js";
import { seconds } from "./forms.js";
import { insight } from "./lazy.js";
import { unpacked } from "./packed.js";
import { table } from "./table.js";
import { dressed, drawn } from "./theme.js";
import { t } from "./words.js";

const APART = 24; // pixels: labels that stand closer would lie on one another

export function timeline({ whole, asked, ask }) {
  if (!whole.timelines.length) return null;
  const wanted = whole.timelines.find((one) => String(one.step) === asked.step);
  const shown = wanted ?? whole.timelines[0];
  const height = 30 * shown.rows.length;
  const room = h("div", { style: { minHeight: `${height + 110}px` } });
  insight(room, () => {
    const rows = pieces(shown, whole.charts.timeline, asked.stage, APART / Math.max(room.clientWidth - 60, 100));
    chart(room, dressed(drawn({ ...whole.charts.timeline, height }, rows)), rows, {
      label: t("signals_timeline_label", { step: shown.step, ranks: shown.rows.length }),
      onclick: (row) => row.stage && ask({ stage: asked.stage === row.told ? null : row.told }),
    });
  });
  const others = whole.timelines.filter((one) => one !== shown);
  return h("figure", { class: "signals-timeline" },
    h("h3", null, t("signals_timeline", { step: shown.step })),
    asked.step && !wanted && h("p", { class: "missing" }, t("signals_timeline_missing", { asked: asked.step, step: shown.step })),
    h("p", { class: "note" }, t("signals_timeline_note"), " ", others.length > 0 && t("signals_timelines"),
      others.map((one) => [" ", h("button", { type: "button", class: "linklike", onclick: () => ask({ step: String(one.step) }) }, String(one.step))])),
    room, sums(shown, asked.stage, ask));
}

function pieces(shown, spec, stage, apart) {
  const known = new Set(spec.layer[0].encoding.color.scale.domain);
  const sumOf = new Map(shown.sums.map((one) => [`${one.row} ${one.stage}`, one]));
  const made = unpacked(shown.pieces).map((piece) => {
    const sum = sumOf.get(`${piece.row} ${piece.stage}`);
    return {
      kind: piece.what, row: piece.row, name: shown.rows[piece.row], begin: piece.begin, end: piece.end, told: piece.stage,
      stage: known.has(piece.stage) ? piece.stage : "other", open: Boolean(piece.open), dim: Boolean(stage) && stage !== piece.stage,
      took: seconds((piece.end - piece.begin) / 1e3), comm: sum ? seconds(sum.comm_seconds) : "·", waited: sum && sum.waited_seconds !== null ? seconds(sum.waited_seconds) : "·",
    };
  });
  made.sort((a, b) => a.row - b.row);
  return [...made, ...labels(made.filter((one) => one.kind === "stage" && one.row === 0), shown.ms * apart)];
}

// Names over the stages, of the longest first, where there is room.
function labels(stages, apart) {
  const found = [];
  for (const one of [...stages].sort((a, b) => b.end - b.begin - (a.end - a.begin))) {
    const middle = (one.begin + one.end) / 2;
    if (found.every((other) => Math.abs(other.middle - middle) >= apart)) found.push({ kind: "label", told: one.told, middle });
  }
  return found;
}

function sums(shown, stage, ask) {
  const rows = shown.sums.filter((one) => !stage || one.stage === stage).map((one) => ({ ...one, name: shown.rows[one.row] }));
  if (!rows.length) return null;
  const columns = [
    { name: "name", title: t("rank") }, { name: "stage", title: t("stage") }, { name: "seconds", title: t("signals_took"), form: "seconds" },
    { name: "comm_seconds", title: t("signals_comm"), form: "seconds" }, { name: "waited_seconds", title: t("signals_waited"), form: "seconds" },
    { name: "waited_for", title: t("signals_waited_for"), form: "count" },
  ];
  return h("details", { open: Boolean(stage) }, h("summary", null, t("signals_sums", { count: rows.length })), 
    table(columns, rows, { label: t("signals_timeline", { step: shown.step }), onrow: (row) => ask({ stage: stage ? null : row.stage }) }));
}
