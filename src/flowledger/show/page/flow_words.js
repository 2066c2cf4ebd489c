// What is said of a strand: its row, for the eye and for a screen reader, and the explanation beside the drawing.

import { h } from "./dom.js";
import { named } from "./flow_columns.js";
import { address } from "./link.js";
import { ABSENT, bytes, shape, written } from "./forms.js";
import { own } from "./own.js";
import { say, t } from "./words.js";

// The shape of one use, as it is asked for: symbols or numbers, the whole or a rank's part.
export function formed(use, { local, dims, rank }) {
  if (local) {
    const [told, least] = use.by_rank ? [use.by_rank[rank]?.[0], null] : [use.local_shape, use.local_shape_min];
    return told ? shape(told, least) : "";
  }
  if (dims === "symbols" && use.dims !== null) return `[${use.dims}]`;
  const whole = use.logical_shape ?? use.local_shape;
  return whole ? shape(whole, use.logical_shape_min) : "";
}

function sized(use, { local, rank }) {
  return local && use.by_rank ? use.by_rank[rank]?.[1] : use.bytes;
}

function ending(piece, columns) {
  if (piece.ends === "stays") return t("flow_ends_stays");
  const where = { place: named(columns[piece.freed]), need: named(columns[piece.until]) };
  const key = { freed: "flow_ends_freed", after: "flow_ends_after", declared: "flow_ends_declared", held: "flow_ends_held" }[piece.ends] ?? "flow_ends_unseen";
  const held = piece.freed > piece.until ? `${t("flow_needed_until", where)}; ` : "";
  return held + t(key, where) + (piece.outlives ? ` ${t("flow_outlives", { holder: piece.holder ?? t("flow_nobody") })}` : "");
}

// One sentence that tells what the strand shows.
export function spoken(strand, data, ways) {
  const places = (list) => [...new Set(list.map((at) => named(data.columns[at])))].join(", ");
  const made = strand.pieces.map((piece) => {
    const forms = piece.made.map(([at, use]) => [named(data.columns[at]), use === null ? "" : formed(strand.uses[use], ways)].join(" ").trim()).join(", ");
    const where = piece.born === null ? t("flow_was_there") + (forms ? `, ${t("flow_made_in", { forms })}` : "") : t("flow_made_in", { forms });
    return `${where}, ${ending(piece, data.columns)}`;
  });
  const read = strand.reads.length ? t("flow_read_in", { places: places(strand.reads) }) : t("flow_never_read");
  return [`${strand.tensor_name}: ${strand.kind ?? ""} ${strand.dtype ?? ""} ${bytes(strand.bytes ?? 0)}B`.replace(/ +/g, " "), ...made, read].join("; ");
}

// The row of a tensor: names and values.
function facts(strand, data, ways) {
  const main = strand.uses.find((use) => use.access?.includes("write")) ?? strand.uses[0];
  const places = (list) => [...new Set(list.map((at) => named(data.columns[at])))].join(", ") || ABSENT;
  return [
    [t("logical_shape"), [main.dims === null ? null : `[${main.dims}]`, main.logical_shape && shape(main.logical_shape, main.logical_shape_min)].filter(Boolean).join(" = ") || ABSENT],
    [t("local_shape"), formed(main, { ...ways, local: true }) || ABSENT],
    [t("flow_dtype"), strand.dtype ?? ABSENT], [t("flow_mask"), strand.mask ?? ABSENT], [t("kind"), strand.kind ?? ABSENT],
    [t("flow_bytes"), written(sized(main, ways) ?? strand.bytes, "bytes")],
    [t("flow_lifetime"), strand.lifetime ?? ABSENT], [t("flow_owner"), strand.owner ?? ABSENT], [t("flow_owner_rank"), strand.owner_rank ?? ABSENT],
    [t("flow_read_by"), places(strand.reads)],
    [t("flow_fate"), strand.pieces.map((piece) => ending(piece, data.columns)).filter((one, at, all) => all.indexOf(one) === at).join("; ")],
  ];
}

export function card(strand, data, ways) {
  const said = own(data.texts, strand.tensor_name);
  return [h("strong", null, strand.tensor_name), listed(facts(strand, data, ways)),
    said && h("p", null, h("b", null, `${t("flow_common_bug")}: `), coded(say(said.common_bug)))];
}

function listed(rows) {
  return h("dl", null, rows.map(([name, value]) => [h("dt", null, name), h("dd", null, value)]));
}

// The explanation of a tensor, and every form in which it occurs.
export function panel(strand, data, ways, { step, onclose }) {
  const said = own(data.texts, strand.tensor_name);
  return h("aside", { class: `flow-panel kind-${strand.kind ?? "none"}`, "aria-label": strand.tensor_name },
    h("button", { type: "button", class: "close", "aria-label": t("flow_close"), onclick: onclose }, "×"),
    h("h3", null, strand.tensor_name),
    said ? [h("p", null, coded(say(said.purpose))), h("p", null, h("b", null, `${t("flow_common_bug")}: `), coded(say(said.common_bug)))] : h("p", { class: "note" }, t("flow_unknown")),
    listed(facts(strand, data, ways)),
    h("h4", null, t("flow_forms")),
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": t("flow_forms") }, forms(strand, ways)),
    h("p", null, h("a", { href: address("lifetimes", { tensor: strand.tensor_name, step }) }, t("flow_see_lifetime")), " · ",
      h("a", { href: address("shapes", { find: strand.tensor_name }) }, t("flow_see_shapes"))));
}

function forms(strand, ways) {
  const heads = [t("stage"), t("flow_shape"), t("flow_local"), t("flow_bytes")];
  const rows = strand.uses.map((use) => h("tr", null,
    h("td", null, use.phase ? `${use.stage}/${use.phase}` : use.stage ?? ABSENT, h("span", { class: "beneath" }, t(`flow_access_${use.access}`))),
    h("td", null, use.dims === null ? ABSENT : `[${use.dims}]`, use.logical_shape && h("span", { class: "beneath" }, shape(use.logical_shape, use.logical_shape_min))),
    h("td", null, formed(use, { ...ways, local: true }) || ABSENT), h("td", { class: "numeric" }, written(sized(use, ways), "bytes"))));
  return h("table", null,
    h("thead", null, h("tr", null, heads.map((head, at) => h("th", { scope: "col", class: at === 3 ? "numeric" : null }, head)))), h("tbody", null, rows));
}

// `names` in a sentence as code.
function coded(sentence) {
  return sentence.split("`").map((part, at) => (at % 2 ? h("code", null, part) : part));
}
