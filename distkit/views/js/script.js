// What happens on the stage, and when: beats in the order of their ends, and what ranks hold.

import { h } from "./dom.js";
import { humanBytes, humanSeconds } from "./numbers.js";

export class Script {
  // inRounds: all messages of a round fly together, a round takes 1.
  constructor(picture, inRounds) {
    const { start, end, beats, changes, nodes } = inRounds ? retimed(picture) : picture;
    Object.assign(this, { start, end, beats, changes, inRounds });
    this.lanes = new Map(nodes.map(({ rank }, i) => [rank, i]));
    this.names = new Map(nodes.map(({ rank, name }) => [rank, name]));
    this.ends = beats.filter((beat) => beat.end !== null).map((beat) => beat.end);
    this.begins = beats.map((beat) => beat.begin).sort((a, b) => a - b);
    const latest = Math.max(start, ...this.ends.slice(-1));
    this.last = beats.some((beat) => beat.end === null) ? end : latest; // nothing moves after it
    this.rounds = new Set(beats.map(({ round }) => round)).size;
    const first = this.ends[0] ?? Infinity;
    this.opening = Math.max(start, ...changes.filter(({ time }) => time < first).slice(-1).map(({ time }) => time));
    this.longest = Math.max(0, ...beats.map((beat) => (beat.end ?? end) - beat.begin));
    this.order = [...beats.keys()].sort((a, b) => beats[a].begin - beats[b].begin);
  }

  // A time in words.
  says(time) {
    if (!this.inRounds) return humanSeconds(time - this.start);
    return `round ${Math.min(Math.floor(time) + 1, this.end)}`;
  }

  lane(rank) {
    return this.lanes.get(rank) ?? 0;
  }

  name(rank) {
    return this.names.get(rank) ?? `rank ${rank}`;
  }

  // The latest beat that has ended; -1: none has.
  at(time) {
    return d3.bisector((x) => x).right(this.ends, time) - 1;
  }

  beside(i, by) {
    return Math.max(-1, Math.min(this.beats.length - 1, i + by));
  }

  // The last beat of the next or the previous round.
  round(i, by) {
    const number = (this.beats[i]?.round ?? -1) + by;
    return this.beats.findLastIndex(({ round }) => round === number);
  }

  // The beats under way: only those that began not too long ago are looked at.
  underWay(time) {
    const { beats, order } = this;
    const found = [];
    for (let i = d3.bisector((k) => beats[k].begin).right(order, time) - 1; i >= 0; i--) {
      const beat = beats[order[i]];
      if (time - beat.begin > this.longest) break;
      if (beat.end === null || beat.end > time) found.push(order[i]);
    }
    return found;
  }

  // When something is under way again: now, or when the next beat begins.
  wakes(time) {
    if (this.underWay(time).some((i) => this.beats[i].end !== null)) return time;
    return this.begins[d3.bisector((x) => x).right(this.begins, time)] ?? time;
  }

  // One beat in full.
  told(i) {
    const beat = this.beats[i];
    if (!beat) return [h("strong", {}, this.beats.length ? "at the start" : "nothing was said")];
    const { who, what } = words(beat, this);
    const took = beat.end === null ? "" : humanSeconds(beat.took ?? beat.end - beat.begin);
    return [h("strong", {}, who), h("span", {}, [what, beat.op === "send" && !beat.label ? "" : beat.label,
      took, beat.where].filter(Boolean).join(" · "))];
  }
}

const FLIGHT = 0.85; // so much of a round a message takes

// The same run on the clock of rounds.
function retimed({ beats, changes, ...picture }) {
  const ends = (end, round) => (end === null ? null : round + FLIGHT);
  const moved = beats.map((beat) => ({ ...beat, begin: beat.round, end: ends(beat.end, beat.round),
    took: beat.end - beat.begin, meet: beat.round + FLIGHT / 2,
    starts: beat.starts?.map(() => beat.round), ends: beat.ends?.map((end) => ends(end, beat.round)) }));
  moved.sort((a, b) => (a.end === null) - (b.end === null) || a.round - b.round);
  return { ...picture, start: 0, end: Math.max(0, ...beats.map(({ round }) => round)) + 1, beats: moved,
    changes: changes.map((change) => ({ ...change, time: change.step })).sort((a, b) => a.time - b.time) };
}

// A beat in words: who, what, and in which round.
export function words(beat, script) {
  const size = beat.nbytes ? humanBytes(beat.nbytes) : "";
  const when = `round ${beat.round + 1}`;
  const lost = beat.end === null ? (beat.sent ? "not received" : "never sent") : "";
  if (beat.members) {
    const all = beat.members.length === script.lanes.size;
    const who = `${beat.op} ${all ? "" : `of ${beat.members.length}`}`.trim();
    const root = beat.root === null || beat.root === undefined ? "" : `root ${beat.root}`;
    return { who, what: [root, size, beat.end === null ? "not finished" : ""].filter(Boolean).join(" · "), when };
  }
  const short = (rank) => script.name(rank).replace(/^rank /, "");
  const does = beat.reduce === undefined ? "" : beat.reduce ? "added" : "replaces";
  const chunk = beat.at === undefined ? "" : `chunk ${beat.at}`;
  return {
    who: `${beat.op === "send" ? "" : `${beat.op} `}${short(beat.src)} → ${short(beat.dst)}`,
    what: [[chunk, does].filter(Boolean).join(" "), size, lost].filter(Boolean).join(" · "), when,
  };
}

