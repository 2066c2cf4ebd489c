// One tensor as a box with its dims, and on it the part that each rank holds. Put together they are the whole: the first law.

import { h, s } from "./dom.js";
import { count, shape } from "./forms.js";
import { pick } from "./mesh_pick.js";
import { say, t } from "./words.js";

const WIDE = 560, TALL = 260, DEEP = 90, LEFT = 96, TOP = 34, MOST_PARTS = 600;

export function drawTensor({ data, tensor, rank, set }) {
  if (!tensor) return h("p", { class: "note" }, t("mesh_no_tensors"));
  const names = [...new Set(data.tensors.map((entry) => entry.tensor_name))];
  const forms = data.tensors.filter((entry) => entry.tensor_name === tensor.tensor_name);
  const place = (entry) => `${entry.at}|${entry.dims}`;
  const title = (entry) => `${entry.at} · [${entry.dims.join(", ")}]${entry.also.length ? ` · +${entry.also.length}` : ""}`;
  const part = rank === null ? null : partOf(data, tensor, rank);
  return h("div", null,
    h("div", { class: "controls" },
      pick(t("tensor"), "mesh-tensor", names.map((name) => [name, name]), tensor.tensor_name,
        (name) => set({ tensor: name, at: null, form: null }, "mesh-tensor")),
      pick(t("mesh_where"), "mesh-at", forms.map((entry) => [place(entry), title(entry)]), place(tensor), (chosen) => {
        const [at, form] = chosen.split("|");
        set({ tensor: tensor.tensor_name, at, form }, "mesh-at");
      })),
    h("div", { class: "mesh-beside" },
      tensor.why ? h("p", { class: "missing" }, say(tensor.why))
        : otherDims(tensor) ?? (tensor.logical_shape?.length ? picture(data, tensor, rank, part) : h("p", { class: "note" }, t("mesh_scalar"))),
      h("div", { class: "mesh-told" }, facts(tensor), tensor.law ? lawOf(tensor) : null, mine(data, tensor, rank, part))));
}

// A sentence where parts have another number of dims than the whole: they do not lie in its box.
function otherDims({ logical_shape: whole, parts }) {
  const apart = parts.filter((part) => whole && (part.local_shape.length !== whole.length || part.box.length !== whole.length));
  return apart.length ? h("p", { class: "missing" }, t("mesh_other_dims", { parts: forms(apart), whole: shape(whole) })) : null;
}

const forms = (parts) => [...new Set(parts.map((part) => shape(part.local_shape)))].slice(0, 4).join(", ");

// The part that a rank holds; of a tensor of one layer the part of the rank that stands likewise in the stage that has the layer.
function partOf(data, tensor, rank) {
  const known = tensor.parts.find((part) => part.members.includes(rank));
  if (known || !tensor.parts.length) return known ?? null;
  if (!tensor.lines) return tensor.layer === null ? null : tensor.parts.find((part) => part.members.some((other) => likewise(data, other, rank))) ?? null;
  const place = ({ axes }) => axes.reduce((at, axis) => at * degree(data, tensor, axis) + along(data, tensor, axis, rank), 0);
  const box = tensor.lines.map((line) => line.pieces[place(line)] ?? []);
  const local = box.map((intervals) => intervals.reduce((sum, [start, stop]) => sum + stop - start, 0));
  return { box, members: [rank], ranks: String(rank), local_shape: local, elements: local.reduce((a, b) => a * b, 1) };
}

const likewise = (data, one, other) => data.axes.every(({ axis, steps }) => axis === "pp" || place(steps, one) === place(steps, other));
const place = (steps, rank) => steps.reduce((at, [stride, many]) => at * many + (Math.floor(rank / stride) % many), 0);
const degree = (data, tensor, axis) => (tensor.mesh === "rollout" && axis === "dp" ? data.size : data.axes.find((one) => one.axis === axis)?.degree ?? 1);

function along(data, tensor, axis, rank) {
  if (tensor.mesh === "rollout" && axis === "dp") return rank;
  return place(data.axes.find((one) => one.axis === axis)?.steps ?? [], rank);
}

function facts(tensor) {
  const symbols = tensor.dims.length ? `[${tensor.dims.join(", ")}]` : "[]";
  const alike = tensor.parts.every((part) => part.local_shape.length === tensor.parts[0].local_shape.length);
  const extreme = (pick) => tensor.parts[0]?.local_shape.map((_, dim) => pick(...tensor.parts.map((part) => part.local_shape[dim])));
  const line = (name, value) => h("div", null, h("dt", null, name), h("dd", { class: "mono" }, value));
  return h("dl", { class: "mesh-held" },
    line(t("mesh_dims"), symbols), tensor.logical_shape ? line(t("logical_shape"), shape(tensor.logical_shape)) : null,
    tensor.parts.length ? line(t("local_shape"), alike ? shape(extreme(Math.max), extreme(Math.min)) : forms(tensor.parts)) : null,
    line(t("mesh_placement"), tensor.placement.length ? tensor.placement.join(", ") : t("mesh_replicated")),
    line(t("mesh_lies_on"), t(`mesh_on_${tensor.mesh}`)),
    tensor.layer === null ? null : line(t("mesh_layer"), tensor.layers > 1 ? t("mesh_layer_of", { layer: tensor.layer, layers: tensor.layers }) : tensor.layer));
}

// The law in words, with its numbers; where it does not hold, why.
function lawOf({ law, partial, lines, as_held: asHeld }) {
  const values = { parts: count(law.parts), elements: count(law.elements), missing: count(law.missing), twice: count(law.twice) };
  const copies = law.copies > 1 ? ` ${t("mesh_copies", { copies: count(law.copies), axes: law.replicated.join(", ") })}` : "";
  const summands = partial.length ? ` ${t("mesh_partial", { axes: partial.join(", ") })}` : "";
  const key = law.holds ? "mesh_law_holds" : law.why ? `mesh_law_${law.why}` : "mesh_law_broken";
  return h("p", { class: law.holds ? "mesh-law" : "mesh-law not", "data-law": law.holds ? "holds" : law.why ?? "broken" },
    h("strong", null, law.holds ? "✓ " : law.why ? "≈ " : "✗ "), t(key, values), copies, summands, lines ? ` ${t("mesh_law_reckoned")}` : "",
    asHeld ? ` ${t("mesh_as_held")}` : "");
}

function mine(data, tensor, rank, part) {
  if (rank === null || tensor.why) return null;
  if (!part) return h("p", { class: "note" }, t("mesh_not_here", { rank }));
  const others = part.members.filter((other) => other !== rank);
  const stage = data.axes.find(({ axis }) => axis === "pp")?.steps ?? [];
  const elsewhere = tensor.layer !== null && !tensor.parts.some((one) => one.members.some((other) => place(stage, other) === place(stage, rank)));
  return h("p", { role: "status" }, t(elsewhere ? "mesh_mine_likewise" : "mesh_mine", { rank, box: `[${spelled(part)}]`, shape: shape(part.local_shape), elements: count(part.elements) }),
    others.length && !elsewhere ? ` ${t("mesh_same", { ranks: others.length > 12 ? `${others.slice(0, 12).join(", ")}, …` : others.join(", ") })}` : "");
}

// `32:64, 0:132`; of a zig-zag `0:5+15:19, 0:64`.
function spelled(part) {
  const joined = (intervals) => intervals.reduce((made, [start, stop]) => (made.length && made.at(-1)[1] === start ? [...made.slice(0, -1), [made.at(-1)[0], stop]] : [...made, [start, stop]]), []);
  return part.box.map((intervals) => joined(intervals).map(([start, stop]) => `${start}:${stop}`).join("+")).join(", ");
}

// Up to three dims are drawn: those that are cut, then the longest. A fourth is whole in every part, and said.
function picture(data, tensor, rank, mine) {
  const sizes = tensor.logical_shape, cut = new Set(tensor.cut.map(([, dim]) => dim));
  const order = sizes.map((_, dim) => dim).filter((dim) => sizes[dim] > 1 || sizes.length === 1)
    .sort((a, b) => cut.has(b) - cut.has(a) || sizes[b] - sizes[a]).slice(0, 3).sort((a, b) => a - b);
  const dims = order.length ? order : [0];
  const [down, across, deep] = dims.length === 1 ? [null, dims[0], null] : [dims[0], dims[1], dims[2] ?? null];
  const axis = (dim, length) => ({ dim, length: dim === null ? length : scaled(sizes[dim], length), size: dim === null ? 1 : Math.max(1, reach(tensor, dim)) });
  const x = axis(across, WIDE), y = down === null ? { dim: null, length: 56, size: 1 } : axis(down, TALL), z = deep === null ? { dim: null, length: 0, size: 1 } : axis(deep, DEEP);
  const far = { x: z.length * 0.7, y: z.length * 0.7 };
  const starts = sizes.map((_, dim) => [...new Set(everyPart(tensor, mine).map((part) => part.box[dim][0]?.[0] ?? 0))].sort((a, b) => a - b));
  const parity = (part) => part.box.reduce((sum, intervals, dim) => sum + starts[dim].indexOf(intervals[0]?.[0] ?? 0), 0) % 2;
  const all = everyPart(tensor, mine);
  const blocks = all.flatMap((part) => boxes(part, [y, x, z]).map((box) => ({ ...box, part, nth: parity(part), chosen: part === mine })));
  blocks.sort((a, b) => b.z[0] - a.z[0] || b.y[0] - a.y[0] || a.x[0] - b.x[0]);
  const project = (px, py, pz) => [LEFT + px + (pz / (z.length || 1)) * far.x, TOP + far.y + py - (pz / (z.length || 1)) * far.y];
  const width = LEFT + x.length + far.x + 24, height = TOP + far.y + y.length + 34;
  const label = (dim) => `${tensor.dims[dim] ?? `dim ${dim}`} = ${count(sizes[dim])}`;
  const rest = sizes.map((_, dim) => dim).filter((dim) => !dims.includes(dim) && sizes[dim] > 1);
  const says = t("mesh_box_label", { tensor: tensor.tensor_name, shape: shape(sizes), parts: tensor.law ? tensor.law.parts : tensor.parts.length });
  return h("figure", null, h("div", { class: "scroll" }, s("svg", { class: blocks.length > 40 ? "mesh-picture fine" : "mesh-picture", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": says },
    blocks.map((block) => cuboid(block, project, z.length > 0, data.classes ? "" : block.part.ranks)),
    s("text", { x: LEFT + x.length / 2, y: height - 12, class: "mesh-dim", "text-anchor": "middle" }, `${label(across)} →`),
    down === null ? null : s("text", { x: LEFT - 8, y: TOP + far.y + y.length / 2, class: "mesh-dim", "text-anchor": "end" }, wrap(tensor.dims[down] ?? `dim ${down}`, TOP + far.y + y.length / 2, `${count(sizes[down])} ↓`)),
    deep === null ? null : s("text", { x: LEFT + far.x - 6, y: TOP - 12, class: "mesh-dim" }, `${label(deep)} ↗`))),
  rest.length ? h("figcaption", { class: "note" }, t("mesh_whole_along", { dims: rest.map(label).join(", ") })) : null);
}

function wrap(symbol, y, size) {
  return [s("tspan", { x: LEFT - 8, y: y - 2 }, symbol.length > 13 ? `${symbol.slice(0, 12)}…` : symbol), s("tspan", { x: LEFT - 8, y: y + 14 }, size), s("title", null, symbol)];
}

// Lengths in the picture grow with the size, slowly: [2048, 9216] must not become a line.
function scaled(size, most) {
  return Math.max(most * 0.35, Math.min(most, most * (0.35 + 0.13 * Math.log10(Math.max(1, size)) * 1.4)));
}

function reach(tensor, dim) {
  return Math.max(tensor.logical_shape[dim], ...tensor.parts.flatMap((part) => part.box[dim].map(([, stop]) => stop)));
}

// The boxes of a part: each interval of one dim with each of the others, in the picture's units.
function boxes(part, axes) {
  const along = ({ dim, length, size }) => (dim === null ? [[0, length]] : part.box[dim].filter(([a, b]) => b > a).map(([start, stop]) => [(start / size) * length, (stop / size) * length]));
  const [y, x, z] = axes.map(along);
  return y.flatMap((one) => x.flatMap((two) => z.map((three) => ({ y: one, x: two, z: three }))));
}

// Of many ranks every part that there is, as long as they can be told apart; else those of the ranks that are drawn.
function everyPart(tensor, mine) {
  if (!tensor.lines) return tensor.parts;
  const pieces = tensor.lines.map((line) => [...new Map(line.pieces.map((piece) => [String(piece), piece])).values()]);
  if (pieces.reduce((product, list) => product * list.length, 1) > MOST_PARTS) return mine && !tensor.parts.includes(mine) ? [...tensor.parts, mine] : tensor.parts;
  const boxes_ = pieces.reduce((made, list) => made.flatMap((one) => list.map((piece) => [...one, piece])), [[]]);
  return boxes_.map((box) => (mine && String(mine.box) === String(box) ? mine : { box, members: [], ranks: "" }));
}

function cuboid({ x, y, z, part, nth, chosen }, project, deep, name) {
  const corner = (px, py, pz) => project(px, py, pz).map((value) => value.toFixed(1)).join(",");
  const face = (points, kind) => [s("polygon", { points: points.join(" "), class: "mesh-behind" }), s("polygon", { points: points.join(" "), class: `mesh-face ${kind}` })];
  const [left, top] = project(x[0], y[0], z[0]);
  const wide = x[1] - x[0], tall = y[1] - y[0];
  return s("g", { class: `mesh-block${chosen ? " chosen" : nth ? " odd" : ""}` },
    s("title", null, `${part.ranks ? `${t("rank")} ${part.ranks}: ` : ""}${spelled(part)}`),
    deep ? face([corner(x[0], y[0], z[0]), corner(x[1], y[0], z[0]), corner(x[1], y[0], z[1]), corner(x[0], y[0], z[1])], "top") : null,
    deep ? face([corner(x[1], y[0], z[0]), corner(x[1], y[1], z[0]), corner(x[1], y[1], z[1]), corner(x[1], y[0], z[1])], "side") : null,
    face([corner(x[0], y[0], z[0]), corner(x[1], y[0], z[0]), corner(x[1], y[1], z[0]), corner(x[0], y[1], z[0])], "front"),
    name && wide > 7 * name.length + 6 && tall > 14 ? s("text", { x: left + wide / 2, y: top + tall / 2 + 4, class: "mesh-part" }, name) : null);
}
