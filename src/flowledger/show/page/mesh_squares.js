// Every rank of a large job as a small square, by the two axes of the grid: what the classes above it hide.

import { h, s } from "./dom.js";
import { FORM, warmth } from "./mesh_heat.js";
import { position } from "./mesh_grid.js";
import { t } from "./words.js";

const SQUARE = 10, GAP = 1, ROW = 110;

export function drawSquares({ data, heat, rank, set }) {
  if (!data.squares || !heat) return null;
  const longest = [...data.axes].filter(({ axis }) => axis !== "ep" && axis !== "edp").sort((a, b) => b.degree - a.degree)[0];
  const row = Math.min(ROW, longest ? Math.ceil(data.size / Math.ceil(data.size / ROW)) : ROW);
  const per = data.size % 64 === 0 && row > 64 ? 64 : row;
  const step = SQUARE + GAP;
  const squares = heat.numbers.map((value, at) => s("rect", {
    x: (at % per) * step, y: Math.floor(at / per) * step, width: SQUARE, height: SQUARE, "data-rank": at,
    class: at === rank ? "mesh-square chosen" : "mesh-square", style: { fillOpacity: String(0.06 + 0.9 * warmth(heat, value)) },
  }));
  const told = h("p", { class: "note", role: "status" }, t("mesh_squares", { per }));
  const at = (event) => Number(event.target.dataset?.rank ?? NaN);
  const say = (event) => {
    const one = at(event);
    if (Number.isNaN(one)) return;
    const value = heat.numbers[one];
    const places = data.axes.map(({ axis }) => `${axis} ${position(data, one).at(axis)}`).join(" ");
    told.textContent = `${t("rank")} ${one} · ${places} · ${value === null ? "·" : FORM[heat.name](value)}`;
  };
  const choose = (event) => { if (!Number.isNaN(at(event))) set({ rank: at(event) }, "mesh-rank"); };
  return h("div", { class: "scroll" },
    s("svg", { class: "mesh-squares", width: per * step, height: Math.ceil(data.size / per) * step, role: "img",
      "aria-label": heat.says, onpointerover: say, onclick: choose }, squares),
    told);
}
