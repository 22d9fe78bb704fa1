import assert from "node:assert/strict";
import { test } from "node:test";

import { search } from "../../distkit/views/js/lenses.js";
import { Store } from "../../distkit/views/js/store.js";
import { fixtures } from "./fixtures.mjs";

const { bulk } = fixtures;
const range = (n) => Array.from({ length: n }, (_, i) => i);
const all = (store) => range(store.count).map((i) => store.bar(i));

test("bars are found by their ids and ordered by their starts", () => {
  const store = new Store(bulk.all_reduce);
  for (const bar of all(store)) assert.equal(store.find(bar.id).i, bar.i);
  assert.equal(store.find("99.0"), undefined);
  const starts = Array.from(store.ordered(), (i) => store.start[i]);
  assert.deepEqual(starts, [...starts].sort((a, b) => a - b));
});

test("members of a collective are sorted by lane and highlighted together", () => {
  const store = new Store(bulk.sync_sgd);
  const tied = all(store).find(({ collective }) => collective >= 0);
  const members = store.members(tied.collective);
  assert.deepEqual(members.map((i) => store.lane(i)), range(store.frame.lanes.length));
  assert.deepEqual([...store.related(tied).bars].sort(), [...members].sort());
  assert.deepEqual(store.members(-1), []);
  assert.equal(store.related(null), null);
});

test("an unfinished operation is open and appears in the legend", () => {
  const store = new Store(bulk.hang);
  assert.ok(store.open.size > 0);
  assert.ok([...store.open].every((i) => store.bar(i).end === null));
  assert.ok(store.kinds().has("open"));
  assert.ok(!new Store(bulk.p2p).kinds().has("open"));
});

test("search finds text in the name, line, label and rank", () => {
  const store = new Store(bulk.all_reduce);
  const found = (text) => [...search(store, text).bars].map((i) => store.bar(i));
  assert.equal(found("").length, store.count);
  assert.ok(found(" Rank 2").length && found("Rank 2").every(({ rank }) => rank === 2));
  assert.ok(found("SEND").length && found("send").every(({ op }) => op === "send"));
  const { where } = store.bar(0);
  assert.ok(found(where).length && found(where).every((bar) => bar.where === where));
  assert.equal(found("bytes>1").length, 0);
});
