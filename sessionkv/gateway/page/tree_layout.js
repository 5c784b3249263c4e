// Where the turns of sessions go in the picture: one row for each session, turns from left to right.
// Pure: maps in, rows out.

/**
 * Trees of the sessions of a listing, those used last first.
 *
 * A tree is `{root, rows}`, a row `{session, turns, from}`: the turns that are drawn in it (a turn
 * that several sessions share is drawn in the row of the oldest), and where it branches off,
 * `{row, turn}`, null in the first row. A session on a turn of another row has no turns.
 */
export function treesOf({ sessions, nodes }) {
  const byNode = new Map(nodes.map((node) => [node.node, node]));
  const roots = new Map();
  for (const session of sessions) {
    const path = pathTo(session.node, byNode);
    const root = path.length ? path[0].node : `damaged ${session.name}`;
    if (!roots.has(root)) roots.set(root, []);
    roots.get(root).push({ session, path });
  }
  const trees = [...roots].map(([root, members]) => ({ root, rows: rowsOf(members) }));
  return trees.sort((a, b) => lastUse(b) - lastUse(a));
}

const lastUse = (tree) => Math.max(...tree.rows.map((row) => row.session.updated_s));

function pathTo(node, byNode) {
  const path = [];
  for (let at = byNode.get(node); at !== undefined; at = byNode.get(at.parent)) path.unshift(at);
  return path;
}

function rowsOf(members) {
  const owner = new Map(); // node -> its row
  const rows = [...members]
    .sort((a, b) => a.session.created_s - b.session.created_s)
    .map(({ session, path }) => {
      const turns = path.filter((node) => !owner.has(node.node));
      const last = path[path.length - turns.length - 1];
      const row = { session, turns, from: last ? { row: owner.get(last.node), turn: last } : null, below: [] };
      for (const node of turns) owner.set(node.node, row);
      row.from?.row.below.push(row);
      return row;
    });
  return rows.filter((row) => row.from === null).flatMap(inOrder);
}

/** A row, then those that branch off it, the latest branch first, so that no line crosses. */
function inOrder(row) {
  const below = row.below.sort((a, b) => b.from.turn.turn - a.from.turn.turn);
  return [row, ...below.flatMap(inOrder)];
}
