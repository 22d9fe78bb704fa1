// The operations of several runs. Rank r of the n-th of N runs has the number N * r + n.

import { Store } from "./store.js";

export class Runs extends Store {
  load(picture) {
    super.load(picture);
    this.numbers = null;
  }

  // An open bar ends at its rank's death, or else with its run.
  endOf(i) {
    const { died, end } = this.frame.lanes[this.lane(i)] ?? {};
    return Number.isNaN(this.end[i]) ? died ?? end : this.end[i];
  }

  related(item) {
    if (item?.i === undefined) return super.related(item);
    const all = this.matching(item.i).filter((i) => i >= 0).map((i) => super.related(this.bar(i)));
    const union = (name) => new Set(all.flatMap((one) => [...one[name]]));
    return { bars: union("bars"), arrows: union("arrows") };
  }

  // The matching operation of each run: the n-th one with the same rank and name and, for
  // computation, the same label; -1 if there is none.
  matching(i) {
    const { keys, lists } = this.#numbered();
    const n = this.run(i);
    const nth = lists.get(`${n}/${keys[i]}`).indexOf(i);
    return this.frame.runs.map((_, k) => lists.get(`${k}/${keys[i]}`)?.[nth] ?? -1);
  }

  run(i) {
    return this.tracks[this.track[i]].rank % this.frame.runs.length;
  }

  // The position of an operation among those of its rank, from 1; computation is counted separately.
  position(i) {
    const { rank, mark } = this.tracks[this.track[i]];
    const own = this.tracks.filter((track) => track.rank === rank && track.mark === mark);
    const before = ({ items }) => items.filter((other) => this.seq[other] <= this.seq[i]).length;
    return own.reduce((sum, track) => sum + before(track), 0);
  }

  // The key of each operation, and the operations of each run with that key, in order.
  #numbered() {
    if (this.numbers) return this.numbers;
    const [keys, lists] = [[], new Map()];
    for (let i = 0; i < this.count; i++) {
      const { op, label } = this.categories[this.category[i]];
      const { rank, mark } = this.tracks[this.track[i]];
      keys.push([Math.floor(rank / this.frame.runs.length), op, mark ? label : ""].join("/"));
      const key = `${rank % this.frame.runs.length}/${keys[i]}`;
      lists.set(key, [...lists.get(key) ?? [], i]);
    }
    for (const list of lists.values()) list.sort((a, b) => this.seq[a] - this.seq[b]);
    return (this.numbers = { keys, lists });
  }
}
