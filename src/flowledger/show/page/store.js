// The page's data: in the file itself, or asked for where the page is live.

const held = { document: null };

export function open() {
  held.document = JSON.parse(document.getElementById("data").textContent);
  return held.document;
}

export function about() {
  return held.document.about;
}

// Keys of the choices that a view has here: { step: "0", rank: "3" }, the first is shown first.
export function choices(view) {
  return Object.keys(held.document.views[view].at).map((key) => Object.fromEntries(new URLSearchParams(key)));
}

// The part of a view that is asked for: { data, choice, exact }. `exact` is false where the file does not hold it.
export async function part(view, asked) {
  const here = held.document.views[view];
  if (held.document.live) await fetched(view, here, asked);
  const wanted = Object.fromEntries(Object.entries(asked ?? {}).filter(([name]) => CHOOSES.includes(name)));
  const best = nearest(here, wanted);
  const choice = Object.fromEntries(new URLSearchParams(best));
  const exact = Object.entries(wanted).every(([name, value]) => choice[name] === undefined || choice[name] === value);
  return { data: here.at[best], choice, exact };
}

// What a live page has learnt since: a view's new data, for whoever looks at it next.
export function replace(view, key, data) {
  held.document.views[view].at[key] = data;
}

const CHOOSES = ["rank", "sample", "step"];

// The choice that agrees in most of what is asked for, the first where several do.
function nearest(here, wanted) {
  const keys = Object.keys(here.at);
  const ordered = [here.first, ...keys.filter((key) => key !== here.first)];
  const agree = (key) => {
    const choice = new URLSearchParams(key);
    return Object.entries(wanted).filter(([name, value]) => choice.get(name) === value).length;
  };
  return ordered.reduce((best, key) => (agree(key) > agree(best) ? key : best));
}

async function fetched(view, here, asked) {
  const named = CHOOSES.filter((name) => asked?.[name] !== undefined).map((name) => [name, asked[name]]);
  const key = named.length ? new URLSearchParams(named).toString() : here.first;
  if (key in here.at) return;
  const answer = await fetch(`view/${view}?${key}`, { headers: { Accept: "application/json" } });
  if (answer.ok) Object.assign(here.at, await answer.json());
}
