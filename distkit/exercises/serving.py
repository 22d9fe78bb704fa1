"""The parameter server's exercises: the push handler, whom a pull waits for, which bound."""

from __future__ import annotations

from distkit.exercises import pages, pauses, pushes
from distkit.exercises.task import Task

#: The exercises.
TASKS: list[Task] = [
    Task(
        "push_handler",
        "push_handler(server, worker, number, gradient)",
        "handle a push, and return the list of workers whose waiting pulls are answered now",
        "server.sync: True under dist_sync, False under dist_async. server.workers: how many.\n"
        "server.update(total): one step with a sum.\n"
        "server.waiting: a list of the workers whose pulls wait. It fills as they pull; you take\n"
        "off those whom you answer.\n"
        "server.inbox, a dict, and server.seen, a set: empty at first, and yours.\n"
        "A push may come again: its (worker, number) tells.",
        pages.push_handler,
        (
            "len(server.inbox) tells how many workers have pushed in this round. Under dist_sync, "
            "return [] until it is server.workers; under dist_async one is enough.",
            "A round is complete: server.update(sum(server.inbox.values())), empty the inbox for "
            "the next round, and answer everybody in server.waiting.",
            "Whoever is answered waits no longer. So when a round is complete, and only then, keep "
            "the list, put an empty one in its place, and return the one you kept: "
            "answered, server.waiting = server.waiting, [].",
            "Exactly once: if (worker, number) is in server.seen, it has been counted. Never empty "
            "server.seen: the echo of a push may come rounds later.",
        ),
        pushes.judge,
    ),
    Task(
        "waits_for",
        "waits_for(worker, clocks, bound)",
        "return the set of workers that a pull of this worker waits for",
        "clocks[w] counts the gradients that worker w has pushed so far. Nobody may be more than "
        "bound gradients ahead of anybody.",
        pages.waits_for,
        (
            "A worker's clock counts its gradients. Compare clocks[worker] with every other clock.",
            "It waits for those who are more than bound gradients behind it: exactly bound is "
            "still allowed.",
        ),
        pauses.judge_waits,
    ),
    Task(
        "staleness_bound",
        "staleness_bound(step, pause)",
        "return the smallest bound with which nobody waits while one worker pauses once",
        "Every worker needs step seconds for a gradient; one of them stands still for pause "
        "seconds, once.",
        pages.staleness_bound,
        (
            "How many gradients do the others push while one of them pauses?",
            "A bound is a whole number of gradients, and part of a step counts: math.ceil.",
        ),
        pauses.judge_bound,
    ),
]
