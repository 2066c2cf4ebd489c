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
  const here = held.document.views[view];
  return (here.choices ?? Object.keys(here.at)).map((key) => Object.fromEntries(new URLSearchParams(key)));
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

// What a live page has learnt since: new data of a view, and what there is to choose from. All else that is held is old by then.
export function news(parts) {
  for (const view of Object.values(held.document.views)) view.old = new Set(Object.keys(view.at));
  for (const [name, { choices: keys, at }] of Object.entries(parts)) take(Object.assign(held.document.views[name], { choices: keys }), at);
}

// What a live page has learnt of the run itself.
export function learn(told) {
  Object.assign(held.document.about, told);
}

function take(view, parts) {
  Object.assign(view.at, parts);
  Object.keys(parts).forEach((key) => view.old?.delete(key));
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
  if (key in here.at && !here.old?.has(key)) return;
  try {
    const answer = await fetch(`view/${view}?${key}`, { headers: { Accept: "application/json" } });
    if (answer.ok) take(here, await answer.json());
  } catch { /* the server is away: what is held is shown */ }
}
