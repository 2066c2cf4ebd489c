// Rows that came with every name once, as objects again.

export function unpacked({ names, rows }) {
  return rows.map((row) => Object.fromEntries(names.map((name, at) => [name, row[at]])));
}
