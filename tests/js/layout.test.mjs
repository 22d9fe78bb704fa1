import assert from "node:assert/strict";
import { test } from "node:test";

import { Layout } from "../../distkit/views/js/layout.js";
import { Store } from "../../distkit/views/js/store.js";
import { fixtures, near } from "./fixtures.mjs";

function layoutOf(name, view) {
  const store = new Store(fixtures.bulk[name]);
  const { start, end } = store.frame;
  return new Layout(store, fixtures.theme.sizes, 900, view ?? [start, end], end, () => 60);
}

test("x positions and times are converted both ways", () => {
  const layout = layoutOf("all_reduce");
  const { left, right, view: [from, to] } = layout;
  for (const x of [left, 333, right]) assert.ok(near(layout.x(layout.time(x)), x, 1e-6));
  assert.ok(near(layout.x(from), left) && near(layout.x(to), right));
});

for (const name of Object.keys(fixtures.bulk)) {
  test(`every bar of ${name} is drawn within its lane`, () => {
    const layout = layoutOf(name);
    const { store } = layout;
    for (let i = 0; i < store.count; i++) {
      const [x, y, width, height] = layout.box(i);
      const [top, laneHeight] = [layout.tops[store.lane(i)], layout.heights[store.lane(i)]];
      assert.ok(x >= layout.left - 1e-6 && width >= 2.5 && height > 0);
      assert.ok(y >= top - 1e-6 && y + height <= top + laneHeight + 1e-6);
    }
  });

  test(`every arrow of ${name} starts at its send and ends at its receive`, () => {
    const layout = layoutOf(name);
    const { store } = layout;
    for (let a = 0; a < store.arrows; a++) {
      const [x1, y1, x2, y2, whole] = layout.path(a);
      assert.ok([x1, y1, x2, y2].every(Number.isFinite));
      const edges = layout.tops.flatMap((top, i) => [top, top + layout.heights[i]]);
      const missing = [[store.send[a], y1], [store.recv[a], y2]].filter(([i, y]) => i < 0 && y > 0);
      for (const [, end] of missing) assert.ok(edges.some((y) => near(y, end, 1e-6)));
      if (!whole) continue;
      assert.ok(near(x1, layout.x(store.sent[a])) && near(x2, layout.x(store.received[a])));
    }
  });
}

test("an arrow to a narrow bar ends at the edge of its lane's rows", () => {
  const { start, end } = fixtures.bulk.parameter_server;
  const layout = layoutOf("parameter_server", [start, start + 30 * (end - start)]);
  const { store, tops, heights, scale, sizes: { pad } } = layout;
  const narrow = [...Array(store.arrows).keys()].filter((a) => {
    const recv = store.recv[a];
    return recv >= 0 && store.send[a] >= 0 && layout.box(recv)[2] < 10;
  });
  assert.ok(narrow.length);
  for (const a of narrow) {
    const [, y1, , y2] = layout.path(a);
    const lane = store.lane(store.recv[a]);
    const edge = y2 > y1 ? tops[lane] + pad * scale : tops[lane] + heights[lane] - pad * scale;
    assert.ok(near(y2, edge, 1e-6));
  }
});

test("an unfinished operation of a dead rank is drawn until the rank's death", () => {
  const layout = layoutOf("hang");
  const { store } = layout;
  const { end, lanes } = store.frame;
  const died = end - 0.3 * (end - store.frame.start);
  store.frame.lanes = lanes.map((lane, n) => (n ? lane : { ...lane, died }));
  for (let i = 0; i < store.count; i++) {
    if (!Number.isNaN(store.end[i])) continue;
    const last = store.lane(i) ? end : died;
    assert.equal(store.endOf(i, end), last);
    const [x, , width] = layout.box(i);
    assert.ok(near(x + width, Math.max(layout.x(last), x + 6), 1e-6));
  }
});

test("hit testing finds the bar or arrow at a position", () => {
  const layout = layoutOf("all_reduce");
  const { store } = layout;
  const arrows = Array.from({ length: store.arrows }, (_, a) => [a, layout.path(a)]);
  for (let i = 0; i < store.count; i++) {
    const [x, y, width, height] = layout.box(i);
    if (width > 8) assert.equal(layout.hit(x + width / 2, y + height / 2, arrows).i, i);
  }
  const [a, [x1, y1, x2, y2]] = arrows.find(([, [, , , , whole]]) => whole);
  const found = layout.hit((x1 + x2) / 2, (y1 + y2) / 2, arrows);
  assert.ok(found.a === a || found.i !== undefined);
  assert.equal(layout.hit(2, layout.height + 50, arrows), null);
});

test("a track returns its bars in the visible range", () => {
  const { start, end } = fixtures.bulk.all_reduce;
  const view = [start + 0.4 * (end - start), start + 0.6 * (end - start)];
  const layout = layoutOf("all_reduce", view);
  const { store } = layout;
  for (const track of store.tracks) {
    const [first, last] = layout.visibleRange(track);
    Array.from(track.items).forEach((i, n) => {
      const visible = store.start[i] >= view[0] && store.start[i] < view[1];
      if (visible) assert.ok(n >= first && n < last);
    });
  }
});
