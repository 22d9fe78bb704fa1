"""Every kind of mistake that a diagnosis finds: one rule each, with its page and its sentences.

To add one, write its rule here and create its findings where they are discovered. A variant of a
rule is the same mistake in another situation. ``docs/findings`` and ``distkit explain`` are made
from the pages, and from the programs of :mod:`distkit.hangs`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from distkit.diagnosis.findings import Finding, fill, lines_of
from distkit.events import Span

#: Every kind of mistake, by its code.
RULES: dict[str, Rule] = {}


class Rule:
    """A kind of mistake: its code, and the sentences of its findings.

    Args:
        code: permanent; "" for sentences that several rules share.
        name: in findings and commands.
        page: in ``docs/findings``: a title, what it means, and what to do.
        message: the template of what happened; for its braces see
            :func:`distkit.diagnosis.findings.fill`.
        remedy: the template of what to do.
        desynchronizes: whether later collectives of the ranks no longer match.
        sentences: others, of which :meth:`say` fills one.
    """

    def __init__(
        self,
        code: str,
        name: str,
        page: str,
        *,
        message: str = "",
        remedy: str = "",
        desynchronizes: bool = False,
        **sentences: str,
    ) -> None:
        self.code, self.name, self.page = code, name, page
        self.message, self.remedy = message, remedy
        self.desynchronizes, self.sentences = desynchronizes, sentences
        if code:
            RULES.setdefault(code, self)  # its variants come later

    def variant(self, *, message: str = "", remedy: str = "", **sentences: str) -> Rule:
        """Return a rule for the same mistake in another situation."""
        return Rule(
            self.code,
            self.name,
            self.page,
            message=message or self.message,
            remedy=remedy or self.remedy,
            desynchronizes=self.desynchronizes,
            **{**self.sentences, **sentences},
        )

    def title(self) -> str:
        """Return the first line of the page."""
        return self.page.partition("\n")[0]

    def say(self, sentence: str, **words: object) -> str:
        """Fill one of the other sentences."""
        return fill(self.sentences[sentence], **words)

    def finding(
        self,
        *spans: Span,
        message: str = "",
        remedy: str = "",
        culprits: Iterable[int] = (),
        waiting: Iterable[int] = (),
        missing: Iterable[int] = (),
        hang: bool = False,
        lines: Mapping[int, str] | None = None,
        **words: object,
    ) -> Finding:
        """Return a finding of this kind.

        Args:
            spans: the operations whose lines the finding names.
            message: a template that replaces the rule's message.
            remedy: a sentence that replaces the rule's remedy.
            culprits: see :class:`Finding`.
            waiting: see :class:`Finding`.
            missing: see :class:`Finding`.
            hang: see :class:`Finding`.
            lines: the line of each rank, in place of those of ``spans``.
            words: values for the braces in the rule's sentences.
        """
        return Finding(
            self,
            fill(message or self.message, **words),
            remedy or fill(self.remedy, **words),
            tuple(culprits),
            tuple(waiting),
            tuple(missing),
            dict(lines_of(*spans) if lines is None else lines),
            hang,
        )


#: The rules about calls that are matched with each other, and differ.
MISMATCHES = frozenset("DK201 DK202 DK203 DK204 DK205 DK206 DK306".split())

#: Remedies for a process that has ended, by words in the cause.
ENDINGS = {
    "gloo": "What it received is larger than its tensor: compare the shapes, dtypes and splits "
    "that the ranks pass to this call, and the order of their calls.",
    "SIGKILL": "Another process killed it, or the system when memory ran out: use smaller "
    "batches, or fewer ranks.",
    "SIGSEGV": "It crashed in native code: look at its last call, and at the arguments.",
    "exit status": "Look for a call of os._exit, also in a library: raise an exception instead.",
}


# -- DK1xx: ranks that wait forever, or that end --------------------------------------------


recv_cycle = Rule(
    "DK101",
    "recv_cycle",
    """Two ranks receive from each other before either of them sends.

    `recv` returns when the message has arrived. Each rank blocks in its `recv`, so neither of them
    comes to its `send`.

    Let one of the two send first:

    ```python
    if rank == 0:
        dist.send(x, dst=1)
        dist.recv(y, src=1)
    else:
        dist.recv(y, src=0)
        dist.send(x, dst=0)
    ```

    or start the transfers with `isend` and `irecv` and wait for both afterwards. Plain torch blocks
    until the backend's timeout, 30 minutes with gloo, and then reports the timeout alone.
    """,
    message="{ring}: each waits for the other.",
    remedy="Let one of them send first.",
)


cycle = Rule(
    "DK102",
    "cycle",
    """Ranks wait for each other in a circle.

    Each rank blocks in a call that needs the next rank of the circle, and the last one needs the
    first: a ring in which every rank receives first, two stages of a pipeline that both send,
    collectives on two groups in opposite orders. A `send` blocks, too, until its receiver calls
    `recv`: small messages may pass on some backends, and block on others.

    Make the calls in the same order on every rank, let one rank of a ring do the opposite of the
    others, or use `isend` and `irecv`:

    ```python
    request = dist.isend(x, dst=(rank + 1) % n)
    dist.recv(y, src=(rank - 1) % n)
    request.wait()
    ```

    Plain torch blocks until the backend's timeout.
    """,
    message="{ring}: each waits for the {next}.",
    remedy="Make these calls in the same order on every rank.",
    sends="Let one of them receive first, or use isend.",
    pulls=(
        "A pull waits for pushes of its key by every worker: push and pull the same keys in the "
        "same order on every rank."
    ),
)


raised = Rule(
    "DK103",
    "raised",
    """A rank raised an exception, and perhaps others wait for it.

    The rank leaves its program, so it never makes the calls that the other ranks wait in. distkit
    releases them and reports the exception first. It may also be under way: in a `finally` or an
    `__exit__` a rank can wait in a collective although an exception has taken it there.

    Fix the exception. If a rank must be able to stop, agree on it with the others first:

    ```python
    stop = torch.tensor(float(no_data_left))
    dist.all_reduce(stop)
    if stop > 0:
        break
    ```

    Plain torch shows the exception of the rank; the others fail later with `Connection closed by
    peer`, or wait until the timeout.
    """,
    message="{ranks} {raised}.",
    remedy="Look at its traceback.",
    first="Fix this first: the others wait because of it.",
    leave_together=(
        "Leave the program on every rank after the same calls: let an all_reduce tell the others "
        "that one wants to stop, and leave together."
    ),
)


raised_in_flight = raised.variant(
    message=(
        "rank {rank} raised {raised}, and waits in {call}{where:at} while the exception propagates."
    ),
    remedy=(
        "Fix the exception first. The call at {where} is in a `finally`, an `except` or an "
        "`__exit__`: without the exception rank {rank} would not have reached it yet."
    ),
)


died = Rule(
    "DK104",
    "died",
    """The process of a rank ended in the middle of the run.

    A signal, a crash in native code, `os._exit` or too little memory ended it. The ranks that wait
    for it cannot go on. The message has the signal or the exit status, and the last call that was
    recorded.

    In a container, give it more memory or use smaller batches if it was killed by SIGKILL. Raise an
    exception rather than ending a process:

    ```python
    if broken:
        raise RuntimeError("the batch is empty")
    ```

    Plain torch tells the other ranks `Connection closed by peer`.
    """,
    message="the {process} of {ranks} {ended} ({how}){where:at}{after}.",
    remedy="Look for what ended it: os._exit, a crash in native code, or too little memory.",
    asked="To run without the fault, leave the dk.trouble block.",
    go_on=(
        "The others need {ranks} in every round: to continue without it, create the store with "
        'on_crash="continue"; to replace it, with on_crash="replace".'
    ),
)


in_backend = Rule(
    "DK106",
    "in_backend",
    """All ranks have made the call, and the backend does not finish it.

    The ranks' calls fit together, so none of them is to blame for the wait. Usually the network
    loses messages, an earlier `isend`, `irecv` or `async_op=True` is still open, a process is
    stopped, or there is just a lot of data.

    Wait for every request, try a smaller tensor, and test the network with `distkit doctor
    --hosts`:

    ```python
    request = dist.all_reduce(x, async_op=True)
    request.wait()
    ```

    Plain torch reports its timeout.
    """,
    message=(
        "{here:stay in} for {seconds:.2g} s; no rank is missing, but the backend does not finish "
        "it."
    ),
    remedy=(
        "Possible causes: {network}an operation that is still open (isend, irecv or async_op=True "
        "without wait()), a stopped process, or a large amount of data. If it does not end, "
        "interrupt the run."
    ),
    network="messages lost between hosts (see distkit doctor --hosts {hosts}), ",
)


# -- DK2xx: collectives that do not fit together -----------------------------------------------


mismatch = Rule(
    "",
    "mismatch",
    """The ranks' calls are matched with each other, and they differ.""",
    desynchronizes=True,
    threads=(
        "Several threads of {ranks} call collectives on this group, in an undefined order: give "
        "each thread a group of its own, made by new_group, or call them all from one thread."
    ),
)


divergence = Rule(
    "",
    "divergence",
    """Some ranks make a call that others do not make. The remedies name what keeps them away.""",
    message="{here:wait in}, but {gone:have} {over} without calling it{known}.",
    desynchronizes=True,
    waits_for_all="{here:call}: {name} waits for every rank.",
    same_calls="Every rank of the group has to make the same calls: ",
    all_or_none="move this one out of the condition {guard}, or let no rank make it.",
    alike="make {guard} give the same result on every rank, or move this one out of it.",
    keeps_away="some ranks do not reach this one because of {guard}.",
    hides="{handler} hides the exception of a rank that raises before it gets here.",
    reach="Make every rank reach it{exits}.",
    may_keep_away=": {exits} may keep some away",
    same_number="Give every rank the same number of {what}",
    agree="the condition must have the same value on every rank, so all_reduce it first.",
    same_branch="Make all ranks take the same branch at {exits}: ",
    batches=" (for batches, use DistributedSampler and drop_last=True)",
    stream=(
        " (an IterableDataset has no length: for batches of DDP, write the loop inside `with "
        "Join([model]):`, from torch.distributed.algorithms.join; else agree on the number first)"
    ),
    look=", and look for a break, return or continue that only some ranks reach.",
    look_at=", and look at {guard}.",
    no_sync=", and the same number of backward passes outside of no_sync()",
    meant=" Or pass group=, if only {ranks} are meant.",
)


different_collective = Rule(
    "DK201",
    "different_collective",
    """Ranks call different collectives at the same position.

    The n-th collective of a rank on a group is matched with the n-th of every other member,
    whatever its name. If one rank calls `broadcast` where the others call `all_reduce`, they wait
    for each other, or exchange bytes that mean nothing.

    Make the same calls in the same order on every rank, outside of any condition on the rank:

    ```python
    dist.broadcast(weights, src=0)
    dist.all_reduce(gradient)
    ```

    gloo blocks until its timeout or fails because the sizes do not match.
    `TORCH_DISTRIBUTED_DEBUG=DETAIL` compares the calls before it makes them.
    """,
    message="{here:call}: these calls are matched with each other, but they differ.",
    remedy=(
        "Call the same collectives on every rank, in the same order; look for an `if` around one."
    ),
    desynchronizes=True,
)


only_some = different_collective.variant(
    message="only {here:call}{under}; meanwhile {there:call}{again}.",
    under=", under {guard}",
    again=" for the {n:th} time, which {ranks:have} called {m:time}",
)


another_order = Rule(
    "DK202",
    "another_order",
    """Ranks make the same calls in a different order.

    Collectives are matched by their order alone, and messages between two ranks by their order and
    tag. If two calls are swapped on one rank, their values are silently swapped, too.

    Call them in one order everywhere, such as that of `model.parameters()`, and sort what is
    unordered:

    ```python
    for name in sorted(gradients):
        dist.all_reduce(gradients[name])
    ```

    torch raises no error if the sizes are equal.
    """,
    message="{here:call}: the same collectives in a different order.",
    remedy=(
        "Call the collectives in the same order on every rank: they are matched by their order "
        "alone."
    ),
    desynchronizes=True,
)


reordered_loop = another_order.variant(
    message=(
        "{ranks:call} {op}(){where:at} in {loop}, which takes its items in another order on some "
        "ranks: values change places, and nothing warns of it."
    ),
)


crossed_messages = another_order.variant(
    message=(
        "rank {recv.rank} receives in another order{where} what rank {send.rank} sends: "
        "{sent[0]} into {got[0]}, {sent[1]} into {got[1]}. The sizes are equal, so nothing stops."
    ),
    remedy=(
        "Receive messages in the order in which they are sent, or give them tags: between two "
        "ranks they are matched by their order and tag alone."
    ),
)


different_tensor = Rule(
    "DK203",
    "different_tensor",
    """The ranks of a collective pass tensors of different sizes or dtypes.

    Every rank of an `all_reduce` or `broadcast` must pass the same number of elements of the same
    dtype. A smaller last batch, a list of another length, or calls in another order make them
    differ.

    Pad or cut the tensors, or convert them:

    ```python
    x = torch.nn.functional.pad(x, (0, longest - len(x)))
    dist.all_reduce(x.to(torch.float32))
    ```

    gloo fails with `op.preamble.length <= op.nbytes`, which ends the process, or blocks; NCCL
    blocks or gives wrong numbers.
    """,
    message="{here:call}: all ranks must pass the same shape and dtype.",
    remedy="Give every rank a tensor of the same shape: pad it, or cut it{cause}.",
    desynchronizes=True,
    dtype="Give every rank a tensor of the same dtype: x.to(torch.{dtype}) converts it.",
    last_batch=(
        "; usual causes: a smaller last batch (use drop_last=True), or calls in a different order"
    ),
    reordered=" {loop} takes its items in another order on some ranks.",
    one_call=" If it is one call, pass the same shape and dtype.",
)


different_root = Rule(
    "DK204",
    "different_root",
    """The ranks of a collective name different roots.

    `src` of a `broadcast` or `scatter`, and `dst` of a `reduce` or `gather`, name the same rank on
    every rank: it is the one that gives, or takes. With `src=dist.get_rank()` every rank gives.

    ```python
    dist.broadcast(x, src=0)
    ```

    gloo blocks until its timeout, or leaves each rank with its own values.
    """,
    message="{here:call}: they name different roots.",
    remedy="Name the same {root} on every rank.",
    desynchronizes=True,
)


different_reduction = Rule(
    "DK205",
    "different_reduction",
    """The ranks of a collective pass different reductions.

    Each rank combines what it receives by its own `op`. If one passes MAX and the others SUM, the
    call ends on every rank with a number that is neither.

    ```python
    dist.all_reduce(x, op=dist.ReduceOp.SUM)
    ```

    torch says nothing.
    """,
    message="{here:call}: the result is wrong, and nothing warns of it.",
    remedy="Pass the same reduction on every rank.",
    desynchronizes=True,
)


split_mismatch = Rule(
    "DK206",
    "split_mismatch",
    """In an all_to_all, a rank sends another one more or fewer rows than it expects.

    `output_split_sizes[i]` on rank j must equal `input_split_sizes[j]` on rank i. Otherwise rows
    are lost, or keep their old values.

    Exchange the numbers of rows first:

    ```python
    received = torch.empty_like(sent)  # one number for each rank
    dist.all_to_all_single(received, sent)
    dist.all_to_all_single(y, x, received.tolist(), sent.tolist())
    ```

    gloo blocks, ends the process or says nothing, depending on the sizes.
    """,
    message=(
        "rank {send.rank} sends {rows[0]:row} to {receiver} in {send} (input splits {sent}), but "
        "{receiver} expects {rows[1]:row} (output splits {awaited}){where}."
    ),
    remedy=(
        "Output split i of rank j has to equal input split j of rank i: let the ranks exchange the "
        "counts first, by all_to_all_single of a tensor with one count for each rank."
    ),
)


skipped = Rule(
    "DK207",
    "skipped",
    """A rank ended without a collective that the others wait in.

    Usually the call stands under a condition on the rank, or behind an early `return`. A collective
    needs every member of its group, also those that have nothing to give.

    Move it out of the condition, or make a group of the ranks that call it:

    ```python
    loss = model(batch)
    dist.all_reduce(loss)
    if rank == 0:
        print(loss)
    ```

    Plain torch blocks until the timeout, or reports that a connection was closed.
    """,
    message=divergence.message,
    remedy="Let every rank call it: look for an `if` or an early return that keeps {gone} away.",
    desynchronizes=True,
)


skipped_function = skipped.variant(
    message=(
        "{here:wait in|a backward pass} for {gone}, but {gone:have} {over} without reaching it"
        "{known}."
    ),
    remedy=(
        "Autograd reaches only functions that the loss depends on: a new tensor, such as "
        "torch.empty for an empty batch, cuts the graph. Let the loss depend on the same functions "
        "on every rank, times zero if it does not need them."
    ),
)


uneven = Rule(
    "DK208",
    "uneven",
    """Ranks run different numbers of iterations.

    One rank has a batch more than the others, or leaves the loop earlier: in its last iterations it
    calls collectives that the others never call.

    Give every rank the same number of batches, and decide together when to stop:

    ```python
    sampler = DistributedSampler(dataset, drop_last=True)
    for batch in DataLoader(dataset, sampler=sampler, drop_last=True):
        ...
    ```

    Plain torch blocks in the last iteration until the timeout. DDP's `Join` context lets the ranks
    that have finished take part.
    """,
    message=(
        "{here:call} for the {n:th} time, while {there:go on to}{after}: they run different "
        "numbers of iterations."
    ),
    remedy="{even}.",
    desynchronizes=True,
    after=" after calling it {n:time}",
    without=" without calling it",
)


uneven_end = uneven.variant(
    message=(
        "{here:wait in} for the {more:th} time, but {gone:have} called it {fewer:time} and {over}"
        "{known}."
    ),
)


uneven_backward = uneven.variant(
    message=(
        "{here:start|one more backward pass}, while {there:go on to}: they run different numbers "
        "of iterations."
    ),
)


uneven_backward_end = uneven.variant(
    message=(
        "{here:wait in|a backward pass} for {gone}, but {gone:have} {over} without another one"
        "{known}."
    ),
)


missing_barrier = Rule(
    "DK209",
    "missing_barrier",
    """A rank does not call a barrier that the others wait in.

    `barrier` returns when every rank of the group has called it. If it is inside a condition,
    the others wait forever.

    ```python
    if rank == 0:
        download()
    dist.barrier()
    ```

    Plain torch blocks until the timeout; gloo's `monitored_barrier` names the rank.
    """,
    message=divergence.message,
    remedy="Call barrier() on every rank, or on none.",
    desynchronizes=True,
)


# -- DK3xx: messages and requests ------------------------------------------------------------


no_receiver = Rule(
    "DK301",
    "no_receiver",
    """A rank sends a message that no rank receives.

    `send` returns when its receiver has taken the message. Each `send` needs one `recv` on the rank
    that it names: count them on both sides.

    ```python
    if rank == 0:
        dist.send(x, dst=1)
    elif rank == 1:
        dist.recv(x, src=0)
    ```

    Plain torch blocks until the timeout, or reports that a connection was closed.
    """,
    message="{mine:wait in}, but {gone:have} {over} after receiving {done:message}{known}.",
    remedy="Add the missing recv on {gone}, or remove this send: each send needs one recv.",
)


never_received = no_receiver.variant(
    message="rank {mine.peer} never receives what rank {mine.rank} sends in {mine}.",
)


no_sender = Rule(
    "DK302",
    "no_sender",
    """A rank waits for a message that no rank sends.

    `recv` returns when the message has arrived. Each `recv` needs one `send` on the rank that it
    names.

    ```python
    if rank == 0:
        dist.send(x, dst=1)
    elif rank == 1:
        dist.recv(x, src=0)
    ```

    Plain torch blocks until the timeout, or reports that a connection was closed.
    """,
    message="{mine:wait in}, but {gone:have} {over} after sending {done:message}{known}.",
    remedy=(
        "Add the missing send on {one_of}{gone}, or remove this recv: each send needs one recv."
    ),
)


never_sent = no_sender.variant(
    message="rank {mine.peer} never sends what rank {mine.rank} waits for in {mine}.",
)


wrong_tag = Rule(
    "DK303",
    "wrong_tag",
    """The two ends of a message have different tags.

    A `recv` takes only a message with its own tag, 0 if it has none. The message with the other tag
    stays where it is, and both ranks wait.

    ```python
    if rank == 0:
        dist.send(x, dst=1, tag=1)
    elif rank == 1:
        dist.recv(x, src=0, tag=1)
    ```

    Plain torch blocks until the timeout. NCCL ignores tags.
    """,
    message=(
        "rank {send.rank} sends to rank {recv.rank} with tag {sent}{send.where:at}, but rank "
        "{recv.rank} waits for tag {awaited} in {recv}."
    ),
    remedy="Give the send and its receive the same tag.",
)


wrong_source = Rule(
    "DK304",
    "wrong_source",
    """A rank waits for a message of one rank, and another rank sends to it.

    `src` of a `recv` is the rank that sends: not the next one in a ring, and in a group still the
    rank in the whole world.

    ```python
    if rank == 1:
        dist.send(x, dst=2)
    elif rank == 2:
        dist.recv(x, src=1)
    ```

    Plain torch blocks until the timeout.
    """,
    message="{mine:wait in} for rank {mine.peer}{over}, but {send:send to it in}.",
    remedy="Receive from rank {send.rank}, or let rank {mine.peer} send.",
)


wrong_destination = Rule(
    "DK305",
    "wrong_destination",
    """A rank sends a message to one rank, and another rank waits for it.

    `dst` of a `send` is the rank that receives, in a group still the rank in the whole world.

    ```python
    if rank == 0:
        dist.send(x, dst=1)
    elif rank == 1:
        dist.recv(x, src=0)
    ```

    Plain torch blocks until the timeout.
    """,
    message=(
        "rank {send.rank} sends to rank {send.peer}{over} in {send}, but {recv:wait for it in}."
    ),
    remedy="Send to rank {recv.rank}, or receive on rank {send.peer}.",
)


wrong_tensor = Rule(
    "DK306",
    "wrong_tensor",
    """The two ends of a message differ in size or dtype.

    The bytes of a message are copied into the receiver's tensor as they are. Floats that are
    received into integers become other numbers; a message that is larger than the tensor ends the
    process with gloo.

    Give the receiver a tensor like the sender's, and send the shape first if it varies:

    ```python
    y = torch.empty(shape, dtype=torch.float32)
    dist.recv(y, src=0)
    ```

    torch says nothing where the sizes in bytes are equal; gloo reports `op.preamble.length <=
    op.nbytes` where the message is larger.
    """,
    message=(
        "rank {send.rank} sends {sent} to rank {recv.rank}{send.where:at}, which receives it into "
        "{got}{recv.where:at}{others}."
    ),
    remedy="Give the receive buffer the shape and the dtype of what is sent.{other}",
    others=" (and in {n:more message})",
    other=" If another message was meant, receive in the order of sending, or use tags.",
)


message_race = Rule(
    "DK307",
    "message_race",
    """Chance decides which message a receive from any source takes.

    `recv` without `src` takes whichever message arrives first. If the program uses the first one
    otherwise than the second, its result changes from run to run.

    Name the source, or use what `recv` returns:

    ```python
    for _ in range(n - 1):
        sender = dist.recv(y)
        results[sender] = y.clone()
    ```

    torch says nothing.
    """,
    message=(
        "rank {rank} receives from any source{where}: {senders} send to it, and chance decides "
        "whose message comes first."
    ),
    remedy="Pass src= to each recv, or take the sender from what recv returns.",
)


message_taken = message_race.variant(
    message=(
        "{mine:wait in}, but its recv(src=any){early.where:at} has taken the message of rank "
        "{mine.peer}, which came first{left}."
    ),
    left="; what rank {left.rank} sends{left.where:at} is left over",
)


buffer_in_use = Rule(
    "DK308",
    "buffer_in_use",
    """A tensor is used before the request that transfers it is complete.

    After `isend`, `irecv` or a call with `async_op=True` the tensor belongs to the transfer until
    `wait()` returns: what is read may be old, and what is written may be sent, or overwritten.

    ```python
    request = dist.irecv(y, src=0)
    ...  # anything that does not touch y
    request.wait()
    print(y.sum())
    ```

    torch says nothing.
    """,
    message=(
        "{ranks:use} the buffer of {calls}{early}: before wait() the result may not be there yet."
    ),
    remedy="Call wait() on what {name} returned before you use its tensor.",
    early=" too early,{where:at}",
)


buffer_changed = buffer_in_use.variant(
    message=(
        "{ranks:change} the buffer of {calls}{early}: before wait() the call may take the old "
        "values or the new."
    ),
    remedy="Call wait() on what {name} returned before you change its tensor, or pass it a copy.",
)


buffer_overwritten = buffer_in_use.variant(
    message="{ranks:change} the buffer of {calls}{early}: the message may overwrite it.",
    remedy="Call wait() on what {name} returned before you change its tensor.",
)


not_waited = Rule(
    "DK309",
    "not_waited",
    """A program never waits for an asynchronous call.

    `isend`, `irecv` and calls with `async_op=True` return a request at once. The transfer is
    complete when `wait()` of the request returns, and not before.

    ```python
    request = dist.isend(x, dst=1)
    request.wait()
    ```

    torch says nothing; the last messages may be lost when the process ends.
    """,
    message="{calls}{used}.",
    remedy="Call wait() on what isend and irecv return: the transfer is complete only then.",
    used="; the tensor is used{where:at}",
)


left_behind = not_waited.variant(
    message="rank {mine.rank} never waited for its i{mine} and has left; {other:wait in}.",
)


barrier_not_waited = not_waited.variant(
    message="{calls}: the program continues without the other ranks.",
    remedy="Call wait() on what it returns, or leave async_op out.",
)


result_not_waited = not_waited.variant(
    message="{calls}: its result may not be there when the tensor is used{where:at}.",
    remedy="Call wait() on what it returns before you use the tensor.",
)


# -- DK4xx: groups and stores -----------------------------------------------------------------


wrong_group = Rule(
    "DK401",
    "wrong_group",
    """Ranks make the same call on different groups.

    A collective is matched within its group. Two groups of the same ranks are still two groups, and
    a member of a group has to call every collective of it.

    Pass the same group everywhere:

    ```python
    pair = dist.new_group([0, 1])  # on every rank of the world
    if rank in (0, 1):
        dist.all_reduce(x, group=pair)
    ```

    Plain torch blocks until the timeout.
    """,
    message="{here:wait in}: they use different groups, so they never match.",
    remedy="Pass the same group on both sides.",
)


groups_alike = wrong_group.variant(
    message="{here:wait in}: they use different groups of the same ranks, so they never match.",
    remedy=(
        f"{wrong_group.remedy} Each new_group makes another one: use them in the same order on "
        "every rank."
    ),
)


member_missing = wrong_group.variant(
    message=divergence.message,
    remedy=(
        "Every member of a group has to call its collectives, and only members can: compare the "
        "ranks of the group with the ranks that come to this call."
    ),
)


new_group = Rule(
    "DK402",
    "new_group",
    """Not every rank of the world calls new_group, or they name different ranks.

    `new_group` is a collective of all ranks, members or not. torch names groups by counting these
    calls, so a rank that skips one does not find the later groups either.

    ```python
    pair = dist.new_group([0, 1])  # on every rank, outside of any `if`
    ```

    Plain torch blocks in `new_group`, or in the first call on the group.
    """,
    message=divergence.message,
    remedy="Call new_group on every rank of the world, members or not: move it out of the `if`.",
    desynchronizes=True,
)


new_group_counts = new_group.variant(
    message=(
        "{here:call}, and {gone:do} not: torch names groups by counting these calls, so later "
        "groups do not match."
    ),
)


new_group_members = new_group.variant(
    message="{here:call}: all must name the same group.",
    remedy="Call new_group with the same ranks everywhere, on every rank of the world.",
)


leaked_group = Rule(
    "DK403",
    "leaked_group",
    """A line makes groups again and again, and none of them is destroyed.

    torch keeps every group, with its connections and threads, until `destroy_process_group`. In a
    loop they use up file descriptors and memory.

    ```python
    group = dist.new_group()  # once, before the loop
    for batch in batches:
        dist.all_reduce(x, group=group)
    ```

    torch says nothing until the system's limits are reached.
    """,
    message=(
        "{ranks:make} groups with {call}{where:at} again and again; at least {n} are still alive: "
        "torch keeps each with its connections and threads."
    ),
    remedy=(
        "Make the group once, before the loop, or call dist.destroy_process_group(group) when it "
        "is no longer used."
    ),
)


not_a_member = Rule(
    "DK404",
    "not_a_member",
    """A rank calls a collective on a group that it does not belong to.

    The call does nothing on that rank, and its tensor keeps its values.

    ```python
    pair = dist.new_group([0, 1])
    if rank in (0, 1):
        dist.all_reduce(x, group=pair)
    ```

    torch warns once and continues.
    """,
    message="{here:call} on a group without {ranks}: nothing happens there.",
    remedy="Call it on the group's members only, or make the group larger.",
)


destroyed_group = Rule(
    "DK405",
    "destroyed_group",
    """A group is used after one of its members has destroyed it.

    `destroy_process_group` closes the rank's connections of the group: the others then wait for a
    rank that is not in it any more. The rank itself gets an error at its next call.

    Destroy it once, at the end, on every member:

    ```python
    dist.all_reduce(x, group=group)
    dist.barrier()
    dist.destroy_process_group(group)
    ```

    Plain torch says `Invalid process group specified`, or blocks on the other ranks.
    """,
    message="{ranks:have} destroyed {group}{where:at}; {here:wait in}.",
    remedy=(
        "Let every member make the same calls on a group before one of them calls "
        "destroy_process_group: move it after the last of them, on every rank."
    ),
)


used_after_destroy = destroyed_group.variant(
    message="{here:call} on a group that {they} destroyed{where:at}.",
    remedy="Call destroy_process_group once, after the last use of the group.",
)


destroyed_too_early = destroyed_group.variant(
    message="{ranks:destroy} a group{where:at} before waiting for {name}{call.where:at} on it.",
    remedy="Call wait() on what is open before destroy_process_group.",
)


missing_key = Rule(
    "DK406",
    "missing_key",
    """Ranks wait for a key of a store that no rank sets.

    `store.get` and `store.wait` block until some rank has called `store.set` with the same key.
    Look for another spelling, or for a condition that keeps `set` away.

    ```python
    if rank == 0:
        store.set("ready", "yes")
    store.get("ready")
    ```

    Plain torch reports a timeout of the store, and the key.
    """,
    message="{here:wait in}, but no rank has set {keys}{near}{others}.",
    remedy=(
        "Let a rank set {keys} before the others need it; look for another spelling, or for an "
        "`if` that keeps store.set away."
    ),
    near="; rank {set.rank} has called {call}{set.where:at}",
)


# -- DK5xx: gradients --------------------------------------------------------------------------


_LACKS = "{ranks:have} ended a backward pass without the gradients of some parameters{names}"

unused_parameter = Rule(
    "DK501",
    "unused_parameter",
    """A rank's loss does not depend on some parameters, so their gradients are never sent.

    DDP averages the gradients of a bucket when all of them are there. If one rank does not use a
    layer, its bucket stays incomplete, and the other ranks wait for it.

    Use every parameter in every forward pass on every rank, if only times zero, or let DDP look for
    them:

    ```python
    net = DistributedDataParallel(net, find_unused_parameters=True)
    ```

    Plain torch reports it in the next forward pass (`Expected to have finished reduction in the
    prior iteration`), or blocks.
    """,
    message=_LACKS + "; {others:wait for|gradients}.",
    remedy=(
        "Use every parameter of the model in every forward pass, on every rank, or pass "
        "find_unused_parameters=True to DDP."
    ),
    desynchronizes=True,
)


unused_before = unused_parameter.variant(
    message=_LACKS + "{before}.",
    before=" before the next one{where:at}",
)


unused_module = unused_parameter.variant(
    message=(
        "{ranks:have} ended a backward pass without a gradient for {names}, whose result it did "
        "not use; {others:wait for|gradients}."
    ),
    remedy=(
        "Let the loss depend on the result of {names} on every rank, if only times zero: FSDP "
        "reduces the gradients of a module on all ranks, or on none."
    ),
)


zero_gradient = Rule(
    "DK502",
    "zero_gradient",
    """torch.distributed.nn.functional.broadcast loses the gradient of its source in a group.

    It takes the source's rank in the world for its rank in the group (pytorch#130515), so that the
    gradient arrives at another rank, or nowhere.

    Use a group in which the two ranks are equal, or `all_reduce`, whose gradient is right:

    ```python
    x = x if rank == src else torch.zeros_like(x)
    x = torch.distributed.nn.functional.all_reduce(x, group=group)
    ```

    torch says nothing: the gradient is zero.
    """,
    message=(
        "the gradient of {call}{where:at} is zero at its source, rank {root}: "
        "torch.distributed.nn.functional takes the source's rank of the world for its rank in the "
        "group (pytorch#130515)."
    ),
    remedy=(
        "Use a group in which the source has the same rank as in the world; or let the source's "
        "tensor and zeros of the others go through torch.distributed.nn.functional.all_reduce, "
        "whose gradient is right."
    ),
)


# -- DK6xx: the parameter server -----------------------------------------------------------------


unanswered = Rule(
    "",
    "unanswered",
    """A request to the parameter server waits for what other workers do not do.""",
    message="{here:wait in}{condition}, but {others}.",
)


missing_push = Rule(
    "DK601",
    "missing_push",
    """A worker pushes a key less often than the others, and they wait for its gradient.

    Under `dist_sync` a round of a key ends when every worker has pushed it once, and only then the
    server answers the pulls of that round. Other modes wait for bounded or backup gradients.

    Give every worker the same number of batches, and push and pull the same keys:

    ```python
    for x, y in batches:  # as many on every worker
        kv.push("w", gradient(x, y))
        kv.pull("w", out=w)
    ```

    or create the store as `dist_async`. MXNet's server waits forever.
    """,
    message=unanswered.message,
    remedy=(
        "Under dist_sync every worker pushes a key once for each round: give every rank the same "
        "number of batches, and look for an `if`, break, return or continue that only some ranks "
        "reach; or use dist_async, where no worker waits."
    ),
    bound=(
        "The staleness bound also applies to workers that have finished: give every rank the same "
        "number of batches, or a larger staleness."
    ),
    barrier=(
        "A worker that waits at a barrier pushes nothing, and the staleness bound still applies: "
        "call barrier() after the same number of pushes on every rank."
    ),
    late=(
        "With backup workers a late worker's last rounds come when the others may have finished: "
        "do not pull after the last push, or use dist_async."
    ),
)


missing_init = Rule(
    "DK602",
    "missing_init",
    """A worker does not call init of a key.

    The first value of a key is the one that rank 0 passes: the `init` of the other workers waits
    for it.

    ```python
    kv.init("w", w)  # on every worker, outside of any `if`
    ```

    MXNet's workers wait forever.
    """,
    message=unanswered.message,
    remedy=(
        "Call init on every worker; the value that rank 0 passes is used. Move it out of the `if`."
    ),
)


missing_worker = Rule(
    "DK603",
    "missing_worker",
    """A worker does not create the store.

    The servers begin when every worker has called `kvstore.create`.

    ```python
    kv = kvstore.create("dist_sync")  # on every worker, outside of any `if`
    ```

    MXNet's workers wait forever.
    """,
    message=unanswered.message,
    remedy="Create the store on every worker: the servers begin when all are there.",
)


# -- DK9xx: remarks, and limits of the record ------------------------------------------------------


straggler = Rule(
    "DK901",
    "straggler",
    """A rank is slow, and the others wait for it.

    This is no hang: the rank computes, reads data or sleeps, and comes later than the others, again
    and again. A step takes as long as its slowest rank.

    Give it less to do, or look for what slows it down: another process on its machine, larger
    batches, a slower disk.

    ```python
    with torch.profiler.profile() as profile:
        train(batches)
    ```

    torch says nothing.
    """,
    message="{here:wait in} for rank {rank}, which {is_} not communicating.",
    remedy="If it computes, this is not a hang: it may still arrive.",
)


late_again = straggler.variant(
    message=(
        "after the first one, rank {rank} came last to {came} of {total} collectives: the others "
        "waited {seconds:.2g} s for it in all."
    ),
    remedy="This is not a hang: give it less to do, or look for what slows it down.",
)


not_judged = Rule(
    "DK903",
    "not_judged",
    """The record does not contain what a diagnosis needs.

    A record of another program may lack the ends of calls, the members of groups, or some calls.
    Then distkit says so instead of guessing, and what to record next time.

    ```shell
    distkit trace -- torchrun --nproc-per-node 4 train.py
    ```

    records everything that a diagnosis needs.
    """,
    message="{text}",
    remedy="{advice}",
)
