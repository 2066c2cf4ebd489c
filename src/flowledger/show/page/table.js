// A table that can be searched and sorted. Long ones show their first rows, and say so.

import { h, fill } from "./dom.js";
import { written, ABSENT } from "./forms.js";
import { t } from "./words.js";

const NARROW = 3; // columns that a phone has room for side by side: of more, each row stands as a list of what it says
const MOST = 400; // rows that stand in the page at once
const NUMERIC = new Set(["bytes", "count", "number", "percent", "seconds", "milliseconds"]);

// columns: [{ name, title, form, cell?(row) → node or text, hint? }]. `state`: { sort, down, find }; `onstate` is told of changes.
// `onrow`: what a click on a row does; `mark`: the class of a row.
export function table(columns, rows, { label, state = {}, onstate, onrow, mark } = {}) {
  const body = h("tbody");
  const counted = h("p", { class: "note", role: "status" });
  const heads = columns.map((column) => head(column, () => {
    state.down = state.sort === column.name ? !state.down : NUMERIC.has(column.form);
    state.sort = column.name;
    refresh();
  }));
  function refresh() {
    const found = rows.filter((row) => matches(row, columns, state.find));
    const by = columns.find((column) => column.name === state.sort);
    const sorted = by ? ordered(found, by, state.down) : found;
    fill(body, sorted.slice(0, MOST).map((row) => line(row, columns, { onrow, mark })));
    heads.forEach((cell, at) => cell.setAttribute("aria-sort",
      columns[at].name !== state.sort ? "none" : state.down ? "descending" : "ascending"));
    fill(counted, sorted.length > MOST ? t("rows_shown", { shown: MOST, all: sorted.length })
      : sorted.length < rows.length ? t("rows_found", { shown: sorted.length, all: rows.length }) : "");
    onstate?.(state);
  }
  refresh();
  return h("div", { class: "table" },
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label },
      h("table", { class: columns.length > NARROW ? "many" : null }, h("thead", null, h("tr", null, heads)), body)),
    counted);
}

// A field that narrows a table as one types.
export function search(value, onfind) {
  return h("label", { class: "search" }, h("span", { class: "unseen" }, t("search")),
    h("input", { type: "search", value: value ?? "", placeholder: t("search"), oninput: (event) => onfind(event.target.value) }));
}

function head(column, onsort) {
  return h("th", { scope: "col", class: NUMERIC.has(column.form) ? "numeric" : null, title: column.hint },
    h("button", { type: "button", onclick: onsort }, column.title));
}

function line(row, columns, { onrow, mark }) {
  const act = onrow && (() => onrow(row));
  return h("tr", {
    class: mark?.(row), tabindex: act ? 0 : null, onclick: act,
    onkeydown: act && ((event) => event.key === "Enter" && act()),
  }, columns.map((column) => {
    const made = column.cell ? column.cell(row) : written(row[column.name], column.form);
    return h("td", { "data-title": typeof column.title === "string" ? column.title : null, class: [NUMERIC.has(column.form) ? "numeric" : "", made === ABSENT ? "absent" : ""].join(" ").trim() || null }, made);
  }));
}

function matches(row, columns, find) {
  if (!find) return true;
  const text = columns.map((column) => written(row[column.name], column.form)).join(" ").toLowerCase();
  return find.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

function ordered(rows, column, down) {
  const value = (row) => (Array.isArray(row[column.name]) ? row[column.name].reduce((a, b) => a * b, 1) : row[column.name]);
  const sign = down ? -1 : 1;
  return [...rows].sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    if (x === y) return 0;
    if (x === null || x === undefined) return 1;
    if (y === null || y === undefined) return -1;
    return (x < y ? -1 : 1) * sign;
  });
}
