import assert from "node:assert/strict";
import { test } from "node:test";

import { humanBytes, humanSeconds, plural, roundStep } from "../../distkit/views/js/numbers.js";
import { Player, Script } from "../../distkit/views/js/player.js";
import { pace } from "../../distkit/views/js/scene.js";
import { near } from "./fixtures.mjs";

const keyframes = [{ begin: 0, end: 1 }, { begin: 1, end: 1.001 }, { begin: 2, end: 4 }];
const script = (more = {}) =>
  Object.assign(new Script({ start: 0, end: 10, keyframes, ...more }), more);

globalThis.matchMedia = () => ({ matches: true }); // reduced motion: steps are not animated
globalThis.cancelAnimationFrame = () => {};

function createPlayer(loaded = script()) {
  const calls = [];
  const player = new Player(pace, (moving) => calls.push(moving), () => calls.push("played"));
  player.load(loaded, { opening: 0 });
  return Object.assign(player, { calls });
}

test("the latest keyframe that has ended is shown", () => {
  const loaded = script();
  assert.deepEqual([-1, 0.5, 1, 1.0005, 1.001, 3, 4, 9].map((time) => loaded.at(time)),
    [-1, -1, 0, 0, 1, 1, 2, 2]);
  assert.equal(loaded.last, 4);
  assert.equal(script({ keyframes: [...keyframes, { begin: 5, end: null }] }).last, 10);
  assert.deepEqual([loaded.neighbor(2, 1), loaded.neighbor(-1, -1), loaded.neighbor(0, 1)], [2, -1, 1]);
  const at = [0, 1].map((time) => ({ begin: time, end: time }));
  assert.equal(script({ keyframes: at }).neighbor(0, -1), 0); // there is no keyframe before the first
});

test("steps move from keyframe to keyframe and stop at the ends", () => {
  const player = createPlayer();
  const stepBy = (by) => {
    player.step(by);
    return [player.keyframe, player.time];
  };
  assert.deepEqual([stepBy(1), stepBy(1), stepBy(1), stepBy(1)], [[0, 1], [1, 1.001], [2, 4], [2, 4]]);
  assert.deepEqual([stepBy(-1), stepBy(-1), stepBy(-1), stepBy(-1)], [[1, 1.001], [0, 1], [-1, 0], [-1, 0]]);
  player.seek(99);
  assert.deepEqual([player.time, player.keyframe, player.resting], [10, 2, true]);
});

test("a growing scene keeps its position, or follows the end", () => {
  const player = createPlayer();
  player.go(1);
  player.load(script({ end: 20 }), { opening: 0 });
  assert.deepEqual([player.keyframe, player.time], [1, 1.001]);
  player.load(script({ end: 30 }), { opening: 0, follow: true });
  assert.equal(player.time, 30);
});

test("playing never stalls, slows down where messages are dense, and ends at the last keyframe", () => {
  for (const unit of ["", "round"]) {
    const after = pace(script({ unit }));
    const times = [0];
    while (times.at(-1) < 4 && times.length < 10_000) times.push(after(times.at(-1), 16));
    assert.equal(times.at(-1), 4);
    assert.ok(times.every((time, i) => !i || time > times[i - 1]));
    const frames = (from, to) => times.filter((time) => time > from && time <= to).length;
    if (!unit) assert.ok(frames(1, 1.001) >= 4); // a message of one millisecond is visible
  }
});

test("bytes, seconds and counts are formatted", () => {
  assert.deepEqual([0, 1023, 1024, 1536, 3 * 1024 ** 3].map(humanBytes),
    ["0 B", "1023 B", "1 KiB", "1.5 KiB", "3 GiB"]);
  assert.deepEqual([2, 0.0125, 3.21e-6].map(humanSeconds), ["2 s", "12.5 ms", "3.21 µs"]);
  assert.deepEqual([plural(1, "rank"), plural(1200, "rank")], ["1 rank", "1,200 ranks"]);
  assert.ok(near(roundStep(1, 6), 0.2) && near(roundStep(0.0009, 9), 1e-4, 1e-12));
});
