"""The servers view: history, projection, static picture, live updates."""

import json
import math
import xml.etree.ElementTree as ET
from contextlib import contextmanager
from itertools import combinations

import pytest
import torch
import traces
from hypothesis import given, settings
from hypothesis import strategies as st

from distkit.consistency import Asynchronous, Synchronous
from distkit.events import Event, Op, State
from distkit.kvstore.protocol.messages import Init, Pull, Push, Reply
from distkit.kvstore.protocol.optimizer import SGD
from distkit.kvstore.protocol.server import KVServer
from distkit.kvstore.transport.recording import InFlight, ReplyRecorder, record_update
from distkit.recording import recorder
from distkit.trace.trace import Trace
from distkit.views.scene.renderer import to_svg
from distkit.views.scenes import Servers
from distkit.views.servers.history import read
from distkit.views.servers.projection import opening, poster, project, rule_sentence, verdicts
from distkit.views.servers.scene import LAST_BIN, TOKEN, draw, histogram
from distkit_examples.recorded import recorded

ONE = torch.ones(2)
MAX_BYTES = 60_000  # of a static picture


class RecordedServer:
    """Workers 0 to W−1 and a real server W in this process, with all messages recorded."""

    def __init__(self, workers, rule) -> None:
        self.workers, self.node, self.updates, self.replies = workers, workers, [], {}
        self.recorders = [recorder.Recorder(i) for i in range(workers + 1)]
        self.server = KVServer(rule, range(workers), update_context=self._watch)
        self.server.optimizer = SGD(learning_rate=0.5)
        self.notes, self.open, self.pulled = ReplyRecorder(), {}, {}
        self.numbers = [0] * workers

    @contextmanager
    def _watch(self, entry, pushes):
        self.updates.append((entry.key, {p.node: entry.version - p.version for p in pushes}))
        with record_update(entry, pushes):
            yield

    def record_as(self, node):
        recorder.set_current(self.recorders[node])

    def handle_request(self, worker, kind, *fields):
        request = kind(worker, self.numbers[worker], *fields)
        self.numbers[worker] += 1
        self.record_as(worker)
        self.open[request.match] = InFlight(request, self.node)
        self.record_as(self.node)
        self.notes.record_request(request)
        for response in self.server.handle(request):
            self.record_as(self.node)
            self.notes.record_response(response)
            self.record_as(response.node)
            self.open.pop(response.match).end(response)
            if isinstance(response, Reply):
                self.replies[response.match] = response.version
                if response.value is not None:
                    self.pulled[response.node] = response.version
        recorder.set_current(None)
        return request

    def init(self, key="w"):
        for worker in reversed(range(self.workers)):
            self.handle_request(worker, Init, key, (2,), "float32", None if worker else ONE)

    def push(self, worker, key="w"):
        return self.handle_request(worker, Push, key, (2,), self.pulled.get(worker, 0), ONE)

    def pull(self, worker, key="w"):
        return self.handle_request(worker, Pull, key)

    def trace(self, **fields):
        events = [e for r in self.recorders for e in recorder.to_table(r.rank, r.drain())]
        roles = traces.names(*["worker"] * self.workers, "server")
        rule = self.server.rule
        options = {"mode": "dist_async"}
        if isinstance(rule, Synchronous):
            options = {"mode": "dist_sync", "backup": rule.backup}
        elif rule.staleness is not None:
            options["staleness"] = rule.staleness
        for worker in range(self.workers):
            registration = {"attributes": options, "match": f"kv:{worker}:999"}
            at = min(e.time for e in events) - 1.0
            events += [
                Event(worker, 999, Op.REGISTER, State.STARTED, at, peer=99, **registration),
                Event(99, 2 * worker, Op.RECV, State.COMPLETED, at, peer=worker, **registration),
                Event(99, 2 * worker + 1, Op.SEND, State.COMPLETED, at + 0.1, **registration),
                Event(worker, 999, Op.REGISTER, State.COMPLETED, at + 0.2, **registration),
            ]
        return Trace(events, traces.info(ranks=roles, **fields))


def record_server(workers, rule, steps=()):
    run = RecordedServer(workers, rule)
    run.init()
    for method, worker in steps:
        getattr(run, method)(worker)
    return run


def at_time(spans, time):
    """Return the items whose interval contains a time."""
    return [it for begin, end, it in spans if begin <= time and (end is None or end > time)]


def version(run, time, server=None, key="w"):
    """Return the version of a key; None before the first value."""
    server = run.history.ranks_of("server")[0] if server is None else server
    versions = [v for at, v, *_ in run.history.versions.get((server, key), ()) if at <= time]
    return versions[-1] if versions else None


def waiting_gradients(run, time):
    """Return the worker and the version of each gradient in an inbox."""
    spans = ((g.arrived, g.applied, g) for g in run.history.gradients)
    return [(g.node, g.version) for g in at_time(spans, time)]


def status(run, time):
    """Return the activity of each worker: kind and text."""
    found = {node: at_time(spans, time)[0] for node, spans in run.status.items()}
    return {node: (status.kind, status.text) for node, status in found.items()}


def keyframes(run, kind):
    return [keyframe for keyframe in run.keyframes if keyframe.kind == kind]


def details(run, kind):
    return [keyframe.details for keyframe in keyframes(run, kind)]


# -- the history of the events ------------------------------------------------------------


RULES = st.one_of(
    st.builds(Synchronous, backup=st.integers(0, 2)),
    st.builds(Asynchronous, staleness=st.none() | st.integers(0, 2)),
)


@settings(max_examples=80)
@given(
    st.integers(1, 4),
    RULES,
    st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=40),
)
def test_history_matches_the_server(workers, rule, steps) -> None:
    """Versions, staleness, inboxes and waits equal a real server's for any interleaving."""
    run, blocked, pushes, pulls = record_server(workers, rule), set(), [], []
    entry = run.server.entries["w"]
    for is_push, worker in steps:
        worker %= workers
        if worker in blocked:
            continue
        if is_push:
            pushes.append(run.push(worker))
        else:
            pulls.append(run.pull(worker))
        blocked = {node for node, _ in entry.waiting}
    history = read(run.trace())
    waits = {
        r.node: history.waits[r.node][-1][2]
        for r in history.requests
        if r.blocked and math.isinf(r.answered)
    }

    assert [(u.server_key[1], u.staleness) for u in history.updates] == run.updates
    assert [u.version for u in history.updates] == list(range(1, len(run.updates) + 1))
    found = {op: [r for r in history.requests if r.span.op is op] for op in (Op.PUSH, Op.PULL)}
    assert [(r.node, r.version) for r in found[Op.PUSH]] == [(p.node, p.version) for p in pushes]
    assert sum(r.dropped for r in found[Op.PUSH]) == sum(entry.dropped.values())
    assert [r.version for r in found[Op.PULL] if r.reply_sent is not None] == [
        run.replies[p.match] for p in pulls if p.match in run.replies
    ]
    assert sorted(g.node for g in history.gradients if math.isinf(g.applied)) == sorted(
        w for workers in entry.rounds.values() for w in workers
    )
    assert waits.keys() == blocked
    for (node, _), (_, clock) in entry.waiting.items():
        awaited = rule.awaits(clock, entry.version, entry.arrived, range(workers), entry.clocks)
        assert set(waits[node]) == awaited - {node}


# -- the projection -----------------------------------------------------------------------


def test_sync_pulls_wait_for_all_gradients() -> None:
    trace = record_server(
        3, Synchronous(), [("push", 0), ("pull", 0), ("push", 1), ("pull", 1)]
    ).trace()
    run = project(trace)
    assert (version(run, run.end), waiting_gradients(run, run.end)) == (0, [(0, 0), (1, 0)])
    pulls = [(r.arrived, r.answered, r.node) for r in run.history.requests if r.blocked]
    assert at_time(pulls, run.end) == [0, 1] and run.history.quorum == 3
    assert {w: words for w, (kind, words) in status(run, run.end).items() if kind == "waits"} == {
        0: "waits for worker 2",
        1: "waits for worker 2",
    }
    assert run.notices == ["2 pulls never answered"]
    assert (details(run, "pull")[0], details(run, "push")[1]) == (
        "waits for the gradient of worker 1 and worker 2",
        "computed from v0 · 8 B · [1, 1]",
    )
    assert {
        words
        for _, style, _, _, words in draw(trace)["scene"]["shapes"]
        if style == "small" and words.isdecimal()
    } == {"0", "1", "2"}  # the missing worker is named in its empty slot


def test_async_gradients_are_applied_at_once_and_may_be_stale() -> None:
    steps = [("pull", 0), ("pull", 1), ("push", 0), ("push", 1), ("pull", 1)]
    run = project(record_server(2, Asynchronous(), steps).trace())
    *_, (_, _, last, _) = run.history.versions[2, "w"]
    assert (version(run, run.end), last, waiting_gradients(run, run.end)) == (2, {1: 1}, [])
    waiting = [kind for kind, _ in status(run, run.end).values() if kind == "waits"]
    assert (waiting, run.history.quorum) == ([], 1)
    update = keyframes(run, "update")[-1]
    assert f"{update.caption} {update.details}".startswith(
        "server 0 updates w to v2 with worker 1 (stale by 1)"
    )
    # the picture shows when the staleness appeared
    assert (opening(run), poster(run)) == (run.start, update.end)
    assert verdicts(run.history)[0]["text"].startswith("1 of 2 gradients was stale: ")


def test_picture_starts_when_the_last_node_registers() -> None:
    trace = recorded("servers_6")
    registered = [s.start for s in trace.spans if s.op is Op.REGISTER]
    drawn = draw(trace)
    assert len(registered) > 6 and max(registered) > trace.start
    assert drawn["start"] == drawn["opening"] == pytest.approx(max(registered) - trace.start)
    assert drawn["before"] == "the last node registers"
    assert min(k["end"] for k in drawn["keyframes"]) > drawn["start"]


def test_dead_nodes_are_labeled_and_crossed_out() -> None:
    ends = {
        rank: {"how": how, "text": "", "where": ""}
        for rank, how in (("0", "released"), ("1", "died"))
    }
    run = project(record_server(2, Synchronous(), [("push", 0), ("pull", 0)]).trace(ends=ends))
    assert (run.notices, status(run, run.end)) == (
        ["worker 1 died", "1 pull never answered"],
        {0: ("waits", "waits for worker 1"), 1: ("ended", "died")},
    )
    assert (opening(run), details(run, "pull")[-1]) == (
        run.end,
        "waits for the gradient of worker 1 until the run ends",
    )
    assert [death.caption for death in keyframes(run, "death")] == ["worker 1 dies"]


def test_backup_worker_drops_the_last_gradient() -> None:
    steps = [("pull", 0), ("pull", 1), ("pull", 2), ("push", 0), ("push", 1), ("push", 2)]
    run = project(record_server(3, Synchronous(backup=1), steps).trace())
    assert run.notices == ["1 gradient too late, not counted"]
    assert rule_sentence(run.history).startswith(
        "An update applies the first 2 gradients of a round."
    )
    assert details(run, "push")[-1].startswith("computed from v0: too late, not counted")
    assert (waiting_gradients(run, run.end), [u.staleness for u in run.history.updates]) == (
        [],
        [{0: 0, 1: 0}],
    )
    assert verdicts(run.history)[0]["text"].startswith("no gradient was stale: 2 of 2 gradients")


# -- pictures -----------------------------------------------------------------------------

TRACES = {
    "empty": Trace,
    "hang": traces.hang,
    "odd": traces.odd_values,
    "ring": traces.ring,
    "servers": traces.parameter_server,
    "half": lambda: Trace(traces.parameter_server()[: len(traces.parameter_server()) // 2]),
}


@pytest.mark.parametrize("name", TRACES)
def test_any_trace_has_a_small_picture(name) -> None:
    view = Servers(TRACES[name]())
    json.dumps(view._data, allow_nan=False)
    svg = to_svg(view._data)
    assert ET.fromstring(svg) and len(svg.encode()) <= MAX_BYTES
    assert ("this trace has no requests to a parameter server" in repr(view)) is (
        name not in ("servers", "half")
    )


def test_static_picture_shows_all_nodes_and_their_text() -> None:
    run = record_server(3, Synchronous(), [("push", 0), ("pull", 0)])
    svg = to_svg(draw(run.trace(name="<lost & found>")))
    assert [
        text
        for text in (
            "&lt;lost &amp; found&gt;",
            "waits for 1 and 2",
            "server 0",
            "∇v0",
            "v0",
            "worker 0 pulls w from server 0",
        )
        if text not in svg
    ] == []
    assert svg.count("<circle") == 4  # three workers, and a waiting pull


def test_messages_in_flight_do_not_cover_each_other() -> None:
    marks = draw(recorded("servers_6"))["scene"]["marks"]
    flights = combinations((m for m in marks if m[1] == TOKEN and len(m) > 6), 2)
    pairs = [(a, b) for a, b in flights if a[2] < b[3] and b[2] < a[3]]
    assert pairs and all(a[4:8] != b[4:8] for a, b in pairs)


@settings(max_examples=40)
@given(st.lists(st.integers(0, 10**6), max_size=30))
def test_any_subset_of_events_can_be_drawn(cuts) -> None:
    """Any event may be missing during a live run."""
    trace = traces.parameter_server()
    cut = {c % len(trace) for c in cuts}
    rest = Trace([e for i, e in enumerate(trace) if i not in cut], trace.info)
    ET.fromstring(to_svg(draw(rest, live=True)))
    assert all(b.end is None or b.end >= b.begin for b in project(rest, live=True).keyframes)


@given(st.lists(st.integers(0, 14) | st.integers(0, 10**6)))
def test_every_gradient_is_in_one_bin(late) -> None:
    bins = histogram(late)
    assert (
        3 <= len(bins) <= LAST_BIN + 1
        and sum(bins) == len(late)
        and bins[:LAST_BIN] == [late.count(i) for i in range(len(bins))][:LAST_BIN]
    )
