// The page: a head, the views as tabs, and the one that is open. Views draw themselves when they are looked at.

import { h, fill, readable } from "./dom.js";
import { language, say, speak, t } from "./words.js";
import { address, change, go, place } from "./link.js";
import { choices, open, part } from "./store.js";
import { behind, kept, listen, restore } from "./live.js";
import { drawOverview } from "./overview.js";
import { drawFlow } from "./flow.js";
import { drawShapes } from "./shapes.js";
import { drawMemory } from "./memory.js";
import { drawSignals } from "./signals.js";
import { drawLifetimes } from "./lifetimes.js";
import { drawMesh } from "./mesh.js";
import { drawSample } from "./sample.js";

const VIEWS = {
  overview: drawOverview,
  flow: drawFlow,
  shapes: drawShapes,
  memory: drawMemory,
  lifetimes: drawLifetimes,
  mesh: drawMesh,
  sample: drawSample,
  signals: drawSignals,
};

const page = open();
const remembered = (name) => { try { return localStorage.getItem(`flowledger.${name}`); } catch { return null; } };
const remember = (name, value) => { try { localStorage.setItem(`flowledger.${name}`, value); } catch { /* a file may not */ } };

let drawn = null; // the view that was looked at last
let drawing = 0; // a drawing that another one has overtaken is given up

// A view is drawn with what it is asked for: { view, asked, data, choice, exact, choices, set } ; `set` changes what is asked.
async function draw({ keep = false } = {}) {
  const { view: name, asked } = looksAt();
  for (const link of document.querySelectorAll("nav a")) {
    link.setAttribute("aria-current", link.dataset.view === name ? "page" : "false");
    if (link.dataset.view === name) shownIn(link.parentElement, link);
  }
  for (const section of document.querySelectorAll("main > section")) section.hidden = section.id !== name;
  const mine = ++drawing;
  const found = await part(name, asked);
  if (drawing !== mine) return;
  const host = document.getElementById(name);
  const shown = {
    view: name, asked, ...found, choices: choices(name), about: page.about, live: Boolean(page.live),
    set: (more, how) => (how?.quietly ? go(name, { ...asked, ...more }, how) : change(name, asked, more)),
  };
  const body = h("div", { class: "body" });
  const made = [h("h2", { tabindex: -1 }, t(name)), h("p", { class: "question" }, t(`${name}_asks`)), notes(shown), body];
  const drawBody = () => (found.data && !found.data.absent ? tried(body, () => VIEWS[name](body, shown)) : null);
  if (keep) {
    const restore = await behind(host, body, drawBody);
    if (drawing !== mine) return;
    fill(host, ...made);
    restore();
  } else {
    fill(host, ...made);
    await drawBody();
  }
  host.dataset.drawn = "yes";
  if (!keep && drawn !== name) window.scrollTo(0, 0);  // the browser has gone to the element that the link names
  drawn = name;
}

// What is asked for, of a view that there is.
function looksAt() {
  const { view, asked } = place();
  return { view: Object.hasOwn(VIEWS, view) ? view : "overview", asked };
}

// Moves a row of links sideways until one of them is seen whole, and a bit of what is beside it; the page itself stays.
function shownIn(row, link) {
  const beside = 30, left = link.offsetLeft - row.offsetLeft;
  const [from, to] = [left - beside, left + link.offsetWidth + beside];
  if (from < row.scrollLeft) row.scrollLeft = from;
  else if (to > row.scrollLeft + row.clientWidth) row.scrollLeft = to - row.clientWidth;
}

// A view that cannot be drawn says so; the other views are none the worse for it.
async function tried(body, act) {
  try {
    await act();
  } catch (error) {
    console.error(error);
    body.prepend(h("p", { class: "missing", role: "alert" }, t("view_failed", { why: error.message })));
  }
}

// What a view lacks, and why; and whether something else is shown than what was asked for.
function notes({ data, exact, choice, live }) {
  const lines = (data?.missing ?? []).map((sentence) => h("p", { class: "missing" }, say(sentence)));
  if (!exact) {
    const there = Object.entries(choice).map(([name, value]) => `${t(name)} ${value}`).join(", ");
    if (there) lines.unshift(h("p", { class: "missing" }, t(live ? "not_in_run" : "not_in_file", { there })));
  }
  return lines;
}

function frame() {
  const about = page.about;
  const link = (name) => h("a", { href: address(name), "data-view": name }, t(name));
  document.title = readable(`${about.run} · flowledger`);
  fill(document.getElementById("page"),
    h("a", { class: "skip", href: address(place().view, place().asked), onclick: skip }, t("skip")),
    h("header", null,
      h("h1", { title: about.run }, about.run),
      h("p", { class: "about" }, ...facts(about)),
      h("div", { class: "switches" },
        h("button", { type: "button", id: "language", onclick: () => turn("lang", language() === "zh" ? "en" : "zh") },
          language() === "zh" ? "English" : "中文"),
        h("button", { type: "button", id: "theme", onclick: () => turn("theme", dark() ? "light" : "dark") }, t(dark() ? "light" : "dark")))),
    h("nav", { "aria-label": t("views") }, Object.keys(VIEWS).map(link)),
    h("main", null, Object.keys(VIEWS).map((name) => h("section", { id: name, "aria-label": t(name), hidden: true }))),
    h("footer", null, about.made_by));
}

function facts(about) {
  const kinds = about.sources.map((source) => t(`source_${source}`)).join(" + ");
  const mesh = Object.entries(about.mesh).filter(([, degree]) => degree > 1).map(([axis, degree]) => `${axis} ${degree}`).join(" ");
  const parts = [kinds, `${about.framework} ${about.framework_version ?? ""}`.trim(), mesh, about.sources.includes("plan") && about.sources.length === 1
    ? "" : t(`state_${about.state}`)];
  return [parts.filter(Boolean).join(" · "), h("span", { id: "live", role: "status" })];
}

function skip(event) {
  event.preventDefault();
  document.querySelector("main > section:not([hidden]) h2")?.focus();
}

function dark() {
  return document.documentElement.dataset.theme === "dark";
}

async function turn(what, value) {
  const now = () => document.querySelector("main > section:not([hidden])");
  const [was, top] = [now() && kept(now()), window.scrollY];
  remember(what, value);
  if (what === "lang") speak(value);
  else document.documentElement.dataset.theme = value;
  frame();
  document.getElementById(what === "lang" ? "language" : "theme").focus({ preventScroll: true });
  await draw();
  if (!was || !now()) return;
  restore(now(), was);
  window.scrollTo(0, top);
}

document.documentElement.dataset.theme = remembered("theme") ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
speak(remembered("lang") ?? page.lang, page.words);
frame();
window.addEventListener("popstate", () => draw());
window.addEventListener("hashchange", () => draw());
window.addEventListener("moved", () => draw());
draw();
if (page.live) {
  listen(page.live, {
    looksAt,
    onnews: (views) => { if (views.has(looksAt().view)) draw({ keep: true }); },
    onabout: () => fill(document.querySelector("header .about"), ...facts(page.about)),
  });
}
