// Where one is: `#memory?rank=3&stage=update_actor`. Every view can be linked to, and the way back works.

// Anybody can write a link: what is no code of a letter stays as it is written.
export function place() {
  const [view, ...query] = location.hash.slice(1).split("?");
  return { view: plain(view) || "overview", asked: Object.fromEntries(new URLSearchParams(query.join("?"))) };
}

function plain(word) {
  try { return decodeURIComponent(word); } catch { return word; }
}

export function address(view, asked) {
  const named = Object.entries(asked ?? {}).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const query = new URLSearchParams(named.sort(([a], [b]) => (a < b ? -1 : 1))).toString();
  return `#${view}${query ? `?${query}` : ""}`;
}

// Go to a view, or change what is asked of the one that is open; `quietly`: without a step in the way back.
export function go(view, asked, { quietly = false } = {}) {
  const to = address(view, asked);
  if (to === location.hash) return;
  if (quietly) history.replaceState(null, "", to);
  else history.pushState(null, "", to);
  window.dispatchEvent(new Event("moved"));
}

// The change of one thing that is asked of a view.
export function change(view, asked, more) {
  go(view, { ...asked, ...more });
}
