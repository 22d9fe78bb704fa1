// The stage as objects again; stage_packing.py says how it was folded. One that was not stays.

export function unfold({ pieces: told, ...picture }) {
  if (!told) return picture;
  const pieces = told.map((piece) => ({ ...piece, sure: ranks(piece.sure), maybe: ranks(piece.maybe) }));
  const beats = objects(picture.beats).map((beat) => ({ ...beat, piece: pieces[beat.piece] }));
  const changes = objects(picture.changes).map((change) => ({ ...change, pieces: change.pieces.map((n) => pieces[n]) }));
  return { ...picture, beats, changes };
}

function objects({ shapes, rows }) {
  return rows.map(([shape, ...values]) => Object.fromEntries(shapes[shape].map((name, i) => [name, values[i]])));
}

// Ranges, first and last in turn, as the numbers in them.
function ranks(ranges = []) {
  const found = [];
  for (let i = 0; i < ranges.length; i += 2) for (let r = ranges[i]; r <= ranges[i + 1]; r++) found.push(r);
  return found;
}
