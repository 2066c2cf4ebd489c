// What stands under a name that came with a link or a run: `constructor` and the like name nothing.

export function own(things, name) {
  return Object.hasOwn(things, name) ? things[name] : undefined;
}
