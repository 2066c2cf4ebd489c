// What a live page hears: what is new in its run, pushed by the server that made it. The part that is looked at comes by itself.

import { about, learn, news, query } from "./store.js";
import { percent, seconds } from "./forms.js";
import { t } from "./words.js";

const MOVES = ["moved", "popstate", "hashchange"];

// `looksAt` says what is looked at: { view, asked }. `onnews` is told that it has new data, `onabout` that the run has come on.
export function listen(live, { looksAt, onnews, onabout }) {
  const state = { version: live.version, stream: null, at: null };
  if (location.search) history.replaceState(null, "", location.pathname + location.hash);  // the token is in a cookie by now
  const connect = () => {
    const { view, asked: words } = looksAt();
    const asked = new URLSearchParams([["run", live.run], ["view", view], ...query(words)]).toString();
    if (asked === state.at) return;
    state.stream?.close();
    state.at = asked;
    state.stream = opened(`events?${asked}&version=${state.version}`, state, { onnews, onabout });
  };
  MOVES.forEach((move) => window.addEventListener(move, connect));
  window.addEventListener("pagehide", () => state.stream?.close());
  connect();
}

function opened(address, state, { onnews, onabout }) {
  const stream = new EventSource(address);
  const on = (name, act) => stream.addEventListener(name, (event) => act(event.data ? JSON.parse(event.data) : null, event));
  on("open", () => say(true));
  on("error", () => say(false));
  on("begun", () => location.reload());  // another run at the same place, or the first one
  on("pulse", (told) => {
    learn(told);
    say(true);
  });
  on("about", (told) => {
    learn(told);
    onabout();
    say(true);
  });
  on("views", (parts, event) => {
    state.version = Number(event.lastEventId);
    news(parts);
    whenSeen(() => onnews(new Set(Object.keys(parts))));
  });
  return stream;
}

// In words, in the head of the page: whether the server is there, and how far the run has come.
function say(there) {
  const told = document.getElementById("live");
  const { latest, read, looked, state } = about();
  const come = latest ? `${t("step")} ${latest.step}${latest.seconds === null ? "" : ` · ${seconds(latest.seconds)}`}` : null;
  const behind = read < 1 ? t("live_behind", { read: percent(read) }) : null;
  told.textContent = [there && state === "gone" ? null : t(there ? "live_on" : "live_off"), come, behind].filter(Boolean).map((word) => ` · ${word}`).join("");
  Object.assign(told.dataset, { step: latest?.step ?? "", read: read ?? "", looked: looked ?? "" });
}

// A page in the background draws nothing; it does when it is looked at again.
function whenSeen(act) {
  if (!document.hidden) return act();
  document.addEventListener("visibilitychange", act, { once: true });
}

// Draw a section anew, behind the one that is seen: nothing flickers, and what was focused, scrolled or opened stays so.
export async function behind(host, body, draw) {
  const was = kept(host);
  const width = host.clientWidth;
  Object.assign(body.style, { position: "absolute", visibility: "hidden", width: `${width}px` });
  host.append(body);
  await draw();
  Object.assign(body.style, { position: "", visibility: "", width: "" });
  return () => restore(host, was);
}

const FOCUSABLE = "a, button, input, select, summary, [tabindex]";

// What of a section somebody has focused, scrolled or opened.
export function kept(host) {
  const inside = [...host.querySelectorAll(FOCUSABLE)];
  const active = document.activeElement;
  return {
    focused: inside.indexOf(active),
    selected: active?.selectionStart ?? null,
    scrolled: [...host.querySelectorAll(".scroll")].map(({ scrollTop, scrollLeft }) => ({ scrollTop, scrollLeft })),
    opened: [...host.querySelectorAll("details")].map((details) => details.open),
  };
}

// Of the section that is drawn anew.
export function restore(host, was) {
  host.querySelectorAll("details").forEach((details, at) => { details.open = was.opened[at] ?? details.open; });
  host.querySelectorAll(".scroll").forEach((box, at) => Object.assign(box, was.scrolled[at]));
  const found = was.focused < 0 ? null : host.querySelectorAll(FOCUSABLE)[was.focused];
  found?.focus({ preventScroll: true });
  if (found && was.selected !== null) found.setSelectionRange?.(was.selected, was.selected);
}
