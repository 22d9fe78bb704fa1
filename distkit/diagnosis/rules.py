"""Rules for every kind of mistake that a diagnosis finds, each with its page and its sentences.

To add a kind, write its rule here and create its findings where they are detected. A variant of a
rule is the same mistake in a different situation. ``tools/findings`` and ``distkit explain`` read
the pages, and the programs of :mod:`distkit.hangs`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from distkit.diagnosis.findings import Finding, fill, lines_of
from distkit.events import Span

#: Every kind of mistake, by its code.
RULES: dict[str, Rule] = {}


class Rule:
    """A kind of mistake, with its code and the sentences of its findings.

    Args:
        code: the permanent code; "" for sentences that several rules share.
        name: the name in findings and commands.
        page: the page in ``docs/findings``, with a title, the meaning and the remedy.
        message: the template of the message, as described in
            :func:`distkit.diagnosis.findings.fill`.
        remedy: the template of the remedy.
        desynchronizes: whether later collectives of the ranks no longer match.
        sentences: templates of further sentences, for :meth:`fill`.
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
            RULES.setdefault(code, self)  # the rule itself, not its variants

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

    def fill(self, name: str, **values: object) -> str:
        """Fill the template of one of the further sentences."""
        return fill(self.sentences[name], **values)

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
        **values: object,
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
            lines: the line of each rank, instead of the lines of ``spans``.
            values: values for the placeholders of the rule's templates.
        """
        return Finding(
            self,
            fill(message or self.message, **values),
            remedy or fill(self.remedy, **values),
            tuple(culprits),
            tuple(waiting),
            tuple(missing),
            dict(lines_of(*spans) if lines is None else lines),
            hang,
        )


#: Codes of the rules about matched calls that differ.
MISMATCHES = frozenset("DK201 DK202 DK203 DK204 DK205 DK206 DK306".split())

#: Remedies for a process that has ended, by text in the cause.
ENDINGS = {
    "gloo": "It received more data than its tensor holds: compare the shapes, dtypes and splits "
    "that the ranks pass to this call, and the order of their calls.",
    "SIGKILL": "Another process killed it, or the system did because memory ran out: use smaller "
    "batches, or fewer ranks.",
    "SIGSEGV": "It crashed in native code: check the arguments of its last call.",
    "exit status": "Look for a call to os._exit, including in libraries, and raise an exception "
    "instead.",
}


# -- DK1xx: cycles, failed ranks and the backend --------------------------------------------


recv_cycle = Rule(
    "DK101",
    "recv_cycle",
    """Two ranks receive from each other before either of them sends.

    `recv` returns when the message has arrived. Each rank blocks in its `recv`, so neither rank
    reaches its `send`.

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
    until the backend's timeout, 30 minutes with gloo, and then reports only the timeout.
    """,
    message="{ring}: each waits for the other.",
    remedy="Let one of them send first.",
)


cycle = Rule(
    "DK102",
    "cycle",
    """Ranks wait for each other in a cycle.

    Each rank blocks in a call that needs the next rank of the cycle, and the last one needs the
    first. Examples are a ring in which every rank receives first, two pipeline stages that both
    send, and collectives on two groups in opposite orders. A `send` may also block until its
    receiver calls `recv`: some backends buffer small messages, and others block.

    Make the calls in the same order on every rank, reverse send and receive on one rank of a ring,
    or use `isend` and `irecv`:

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
    """A rank raised an exception, and others may wait for it.

    The rank leaves its program, so it never makes the calls that the other ranks wait in. distkit
    releases them and reports the exception first. The exception may still be propagating: a rank
    can wait in a collective inside a `finally` or an `__exit__` that the exception led to.

    Fix the exception. If one rank may have to stop early, let all ranks agree on it first:

    ```python
    stop = torch.tensor(float(no_data_left))
    dist.all_reduce(stop)
    if stop > 0:
        break
    ```

    Plain torch shows the exception of the rank. The others fail later with `Connection closed by
    peer`, or wait until the timeout.
    """,
    message="{ranks} {raised}.",
    remedy="See its traceback.",
    first="Fix this first: the others wait because of it.",
    stop_together=(
        "End the program on every rank after the same calls: use all_reduce to share the decision "
        "to stop."
    ),
)


raised_in_flight = raised.variant(
    message=(
        "rank {rank} raised {raised}, and waits in {call}{where:at} while the exception propagates."
    ),
    remedy=(
        "Fix the exception first. The call at {where} is in a `finally`, an `except` or an "
        "`__exit__`: without the exception, rank {rank} would not have reached it yet."
    ),
)


died = Rule(
    "DK104",
    "died",
    """The process of a rank ended during the run.

    A signal, a crash in native code, `os._exit` or a lack of memory ended it. The ranks that wait
    for it cannot continue. The message states the signal or the exit status, and the last recorded
    call.

    If SIGKILL ended it in a container, increase the container's memory or use smaller batches.
    Raise an exception instead of ending a process:

    ```python
    if broken:
        raise RuntimeError("the batch is empty")
    ```

    Plain torch fails on the other ranks with `Connection closed by peer`.
    """,
    message="the {process} of {ranks} ended ({how}){where:at}{after}.",
    remedy="Find the cause: os._exit, a crash in native code, or a lack of memory.",
    injected="To run without the fault, leave the dk.trouble block.",
    continue_without=(
        "The others need {ranks} in every round: create the store with "
        'on_crash="continue" to continue without it, or with on_crash="replace" to replace it.'
    ),
)


in_backend = Rule(
    "DK106",
    "in_backend",
    """All ranks have made the call, but the backend does not complete it.

    The ranks' calls match, so no rank causes the wait. Usually the network loses messages, an
    earlier `isend`, `irecv` or `async_op=True` call is still pending, a process is stopped, or the
    amount of data is large.

    Wait for every request, try a smaller tensor, and test the network with `distkit doctor
    --hosts`:

    ```python
    request = dist.all_reduce(x, async_op=True)
    request.wait()
    ```

    Plain torch reports its timeout.
    """,
    message=(
        "{here:stay in} for {seconds:.2g} s; no rank is missing, but the backend does not "
        "complete it."
    ),
    remedy=(
        "Possible causes: {network}a pending operation (isend, irecv or async_op=True without "
        "wait()), a stopped process, or a large amount of data. If it does not complete, interrupt "
        "the run."
    ),
    network="messages lost between hosts (see distkit doctor --hosts {hosts}), ",
)


# -- DK2xx: mismatched collectives ------------------------------------------------------------


mismatch = Rule(
    "",
    "mismatch",
    """The ranks' calls are matched with each other, but they differ.""",
    desynchronizes=True,
    threads=(
        "Several threads of {ranks} call collectives on this group, in an undefined order: create "
        "a separate group for each thread with new_group, or call them all from one thread."
    ),
)


divergence = Rule(
    "",
    "divergence",
    """Some ranks make a call that others do not make. The remedies name the cause.""",
    message="{here:wait in}, but {gone:have} {over} without calling it{known}.",
    desynchronizes=True,
    waits_for_all="{here:call}: {name} waits for every rank.",
    same_calls="Every rank of the group must make the same calls: ",
    all_or_none="move this one out of the condition {guard}, or remove it from all ranks.",
    alike="make {guard} have the same result on every rank, or move this one out of it.",
    keeps_away="some ranks do not reach this one because of {guard}.",
    hides="{handler} hides exceptions raised before this call.",
    reach="Make every rank reach it{exits}.",
    may_keep_away=": {exits} may make some ranks skip it",
    same_number="Run the same number of {what} on every rank",
    agree="the condition must have the same value on every rank, so all_reduce it first.",
    same_branch="Take the same branch at {exits} on every rank: ",
    batches=" (for batches, use DistributedSampler and drop_last=True)",
    stream=(
        " (an IterableDataset has no length: with DDP, write the loop inside `with "
        "Join([model]):`, from torch.distributed.algorithms.join; otherwise agree on the number "
        "first)"
    ),
    look=", and look for a `break`, `return` or `continue` that only some ranks reach.",
    look_at=", and check {guard}.",
    no_sync=", and the same number of backward passes outside of no_sync()",
    pass_group=" If only {ranks} should call it, pass group= instead.",
)


different_collective = Rule(
    "DK201",
    "different_collective",
    """Ranks call different collectives at the same position.

    The n-th collective of a rank on a group is matched with the n-th of every other member,
    regardless of its name. If one rank calls `broadcast` where the others call `all_reduce`, they
    wait for each other, or exchange meaningless bytes.

    Make the same calls in the same order on every rank, outside of any condition on the rank:

    ```python
    dist.broadcast(weights, src=0)
    dist.all_reduce(gradient)
    ```

    gloo blocks until its timeout or fails because the sizes do not match.
    `TORCH_DISTRIBUTED_DEBUG=DETAIL` compares the calls before they run.
    """,
    message="{here:call}: these calls are matched with each other, but they differ.",
    remedy=(
        "Call the same collectives on every rank, in the same order: look for an `if` around one."
    ),
    desynchronizes=True,
)


only_some = different_collective.variant(
    message="only {here:call}{under}; meanwhile {there:call}{again}.",
    under=", under {guard}",
    again=" for the {n:th} time, which {ranks:have} called only {m:time}",
)


another_order = Rule(
    "DK202",
    "another_order",
    """Ranks make the same calls in a different order.

    Collectives are matched only by their order, and messages between two ranks by their order and
    tag. If two calls are swapped on one rank, their values are silently swapped as well.

    Call them in the same order on every rank, such as that of `model.parameters()`, and sort
    unordered items:

    ```python
    for name in sorted(gradients):
        dist.all_reduce(gradients[name])
    ```

    torch does not raise an error if the sizes are equal.
    """,
    message="{here:call}: the same collectives in a different order.",
    remedy=(
        "Call the collectives in the same order on every rank: they are matched only by their "
        "order."
    ),
    desynchronizes=True,
)


reordered_loop = another_order.variant(
    message=(
        "{ranks:call} {op}(){where:at} in {loop}, which visits its items in a different order on "
        "some ranks: values are silently swapped."
    ),
)


crossed_messages = another_order.variant(
    message=(
        "rank {recv.rank} receives messages of rank {send.rank} in a different order{where}: "
        "{sent[0]} into {got[0]}, {sent[1]} into {got[1]}. The sizes are equal, so no error occurs."
    ),
    remedy=(
        "Receive messages in the order in which they are sent, or use tags: between two ranks, "
        "they are matched only by order and tag."
    ),
)


different_tensor = Rule(
    "DK203",
    "different_tensor",
    """The ranks of a collective pass tensors of different sizes or dtypes.

    Every rank of an `all_reduce` or `broadcast` must pass the same number of elements of the same
    dtype. A smaller last batch, a list of a different length, or calls in a different order
    cause a mismatch.

    Pad, truncate or convert the tensors:

    ```python
    x = torch.nn.functional.pad(x, (0, longest - len(x)))
    dist.all_reduce(x.to(torch.float32))
    ```

    gloo fails with `op.preamble.length <= op.nbytes`, which ends the process, or blocks. NCCL
    blocks or returns wrong numbers.
    """,
    message="{here:call}: all ranks must pass the same shape and dtype.",
    remedy="Pass a tensor of the same shape on every rank: pad or truncate it{cause}.",
    desynchronizes=True,
    dtype="Pass a tensor of the same dtype on every rank: convert it with x.to(torch.{dtype}).",
    last_batch=(
        "; usual causes: a smaller last batch (use drop_last=True), or calls in a different order"
    ),
    reordered=" {loop} visits its items in a different order on some ranks.",
    one_call=" If they are the same call, pass the same shape and dtype.",
)


different_root = Rule(
    "DK204",
    "different_root",
    """The ranks of a collective pass different roots.

    `src` of a `broadcast` or `scatter`, and `dst` of a `reduce` or `gather`, must be equal on all
    ranks: they name the rank that sends or receives. With `src=dist.get_rank()`, every rank sends.

    ```python
    dist.broadcast(x, src=0)
    ```

    gloo blocks until its timeout, or leaves the values of each rank unchanged.
    """,
    message="{here:call}: they pass different roots.",
    remedy="Pass the same {root} on every rank.",
    desynchronizes=True,
)


different_reduction = Rule(
    "DK205",
    "different_reduction",
    """The ranks of a collective pass different reductions.

    Each rank combines the received values with its own `op`. If one passes MAX and the others SUM,
    the result on every rank is neither the maximum nor the sum.

    ```python
    dist.all_reduce(x, op=dist.ReduceOp.SUM)
    ```

    torch does not report this.
    """,
    message="{here:call}: the result is silently wrong.",
    remedy="Pass the same reduction on every rank.",
    desynchronizes=True,
)


split_mismatch = Rule(
    "DK206",
    "split_mismatch",
    """In an all_to_all, a rank sends more or fewer rows than the receiver expects.

    `output_split_sizes[i]` on rank j must equal `input_split_sizes[j]` on rank i. Otherwise rows
    are lost, or keep their old values.

    Exchange the numbers of rows first:

    ```python
    received = torch.empty_like(sent)  # one number for each rank
    dist.all_to_all_single(received, sent)
    dist.all_to_all_single(y, x, received.tolist(), sent.tolist())
    ```

    gloo blocks, ends the process or reports nothing, depending on the sizes.
    """,
    message=(
        "rank {send.rank} sends {rows[0]:row} to {receiver} in {send} (input splits {sent}), but "
        "{receiver} expects {rows[1]:row} (output splits {awaited}){where}."
    ),
    remedy=(
        "Output split i of rank j must equal input split j of rank i: exchange the counts first, "
        "with all_to_all_single on a tensor with one count for each rank."
    ),
)


skipped = Rule(
    "DK207",
    "skipped",
    """A rank ended without a collective that the others wait in.

    Usually the call is inside a condition on the rank, or after an early `return`. A collective
    needs every member of its group, including members that have no data to contribute.

    Move it out of the condition, or create a group of the ranks that call it:

    ```python
    loss = model(batch)
    dist.all_reduce(loss)
    if rank == 0:
        print(loss)
    ```

    Plain torch blocks until the timeout, or reports that a connection was closed.
    """,
    message=divergence.message,
    remedy="Call it on every rank: look for an `if` or an early return that {gone:take}.",
    desynchronizes=True,
)


skipped_function = skipped.variant(
    message=(
        "{here:wait in|a backward pass} for {gone}, but {gone:have} {over} without reaching it"
        "{known}."
    ),
    remedy=(
        "Autograd reaches only functions that the loss depends on: a new tensor, such as "
        "torch.empty for an empty batch, cuts the graph. Make the loss depend on the same "
        "functions on every rank, multiplied by zero where it does not need them."
    ),
)


uneven = Rule(
    "DK208",
    "uneven",
    """Ranks run different numbers of iterations.

    A rank that has one more batch, or leaves the loop later, calls collectives in its last
    iterations that the others never call.

    Use the same number of batches on every rank, and agree on when to stop:

    ```python
    sampler = DistributedSampler(dataset, drop_last=True)
    for batch in DataLoader(dataset, sampler=sampler, drop_last=True):
        ...
    ```

    Plain torch blocks in the last iteration until the timeout. With DDP's `Join` context, the ranks
    that have finished keep participating.
    """,
    message=(
        "{here:call} for the {n:th} time, while {there:continue with}{after}: they run different "
        "numbers of iterations."
    ),
    remedy="{even}.",
    desynchronizes=True,
    after=" after calling it {n:time}",
    without=" without calling it",
)


uneven_end = uneven.variant(
    message=(
        "{here:wait in} for the {n:th} time, but {gone:have} called it {m:time} and {over}{known}."
    ),
)


uneven_backward = uneven.variant(
    message=(
        "{here:start|one more backward pass}, while {there:continue with}: they run different "
        "numbers of iterations."
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
    remedy="Call barrier() on every rank, or on no rank.",
    desynchronizes=True,
)


# -- DK3xx: messages and requests ------------------------------------------------------------


no_receiver = Rule(
    "DK301",
    "no_receiver",
    """A rank sends a message that no rank receives.

    `send` returns when its receiver has received the message. Each `send` needs one `recv` on its
    destination: count them on both sides.

    ```python
    if rank == 0:
        dist.send(x, dst=1)
    elif rank == 1:
        dist.recv(x, src=0)
    ```

    Plain torch blocks until the timeout, or reports that a connection was closed.
    """,
    message="{span:wait in}, but {gone:have} {over} after receiving {done:message}{known}.",
    remedy="Add the missing recv on {gone}, or remove this send: each send needs one recv.",
)


never_received = no_receiver.variant(
    message="rank {span.peer} never receives the message that rank {span.rank} sends in {span}.",
)


no_sender = Rule(
    "DK302",
    "no_sender",
    """A rank waits for a message that no rank sends.

    `recv` returns when the message has arrived. Each `recv` needs one `send` on its
    source.

    ```python
    if rank == 0:
        dist.send(x, dst=1)
    elif rank == 1:
        dist.recv(x, src=0)
    ```

    Plain torch blocks until the timeout, or reports that a connection was closed.
    """,
    message="{span:wait in}, but {gone:have} {over} after sending {done:message}{known}.",
    remedy=(
        "Add the missing send on {one_of}{gone}, or remove this recv: each send needs one recv."
    ),
)


never_sent = no_sender.variant(
    message="rank {span.peer} never sends the message that rank {span.rank} waits for in {span}.",
)


wrong_tag = Rule(
    "DK303",
    "wrong_tag",
    """The two ends of a message have different tags.

    A `recv` accepts only messages with its own tag, which is 0 by default. A message with a
    different tag is not delivered, and both ranks wait.

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
    remedy="Use the same tag for the send and its receive.",
)


wrong_source = Rule(
    "DK304",
    "wrong_source",
    """A rank waits for a message from one rank, but another rank sends to it.

    `src` of a `recv` is the rank that sends. In a ring it is the previous rank, not the next one,
    and in a group it is the global rank.

    ```python
    if rank == 1:
        dist.send(x, dst=2)
    elif rank == 2:
        dist.recv(x, src=1)
    ```

    Plain torch blocks until the timeout.
    """,
    message="{span:wait in} for rank {span.peer}{over}, but {send:send to it in}.",
    remedy="Receive from rank {send.rank}, or let rank {span.peer} send.",
)


wrong_destination = Rule(
    "DK305",
    "wrong_destination",
    """A rank sends a message to one rank, but another rank waits for it.

    `dst` of a `send` is the global rank of the receiver, even in a group.

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

    The bytes of a message are copied into the receiver's tensor without conversion. Floats
    received into integers become different numbers. With gloo, a message that is larger than the
    tensor ends the process.

    Receive into a tensor like the sender's, and send the shape first if it varies:

    ```python
    y = torch.empty(shape, dtype=torch.float32)
    dist.recv(y, src=0)
    ```

    torch does not report this if the sizes in bytes are equal; gloo reports `op.preamble.length <=
    op.nbytes` if the message is larger.
    """,
    message=(
        "rank {send.rank} sends {sent} to rank {recv.rank}{send.where:at}, which receives it into "
        "{got}{recv.where:at}{others}."
    ),
    remedy="Receive into a tensor with the shape and dtype of the sent tensor.{other}",
    others=" (and in {n:more message})",
    other=" To receive a different message, receive in the order of sending, or use tags.",
)


message_race = Rule(
    "DK307",
    "message_race",
    """A receive from any source depends on the order in which messages arrive.

    `recv` without `src` receives whichever message arrives first. If the program uses the first
    message differently from the second, its result changes from run to run.

    Pass the source, or use the rank that `recv` returns:

    ```python
    for _ in range(n - 1):
        sender = dist.recv(y)
        results[sender] = y.clone()
    ```

    torch does not report this.
    """,
    message=(
        "rank {rank} receives from any source{where}: {senders} send to it, and their messages "
        "may arrive in any order."
    ),
    remedy="Pass src= to each recv, or use the sender's rank that recv returns.",
)


message_taken = message_race.variant(
    message=(
        "{span:wait in}, but its recv(src=any){early.where:at} has received the message of rank "
        "{span.peer}, which arrived first{left}."
    ),
    left="; the message that rank {left.rank} sends{left.where:at} is unmatched",
)


buffer_in_use = Rule(
    "DK308",
    "buffer_in_use",
    """A tensor is used before the request that transfers it is complete.

    After `isend`, `irecv` or a call with `async_op=True`, the tensor belongs to the transfer until
    `wait()` returns. Reads may return old values, and written values may be sent or overwritten.

    ```python
    request = dist.irecv(y, src=0)
    ...  # anything that does not touch y
    request.wait()
    print(y.sum())
    ```

    torch does not report this.
    """,
    message=(
        "{ranks:use} the buffer of {calls}{early}: before wait(), the result may not have arrived."
    ),
    remedy="Call wait() on the request that {name} returned before you use its tensor.",
    early=" too early,{where:at}",
)


buffer_changed = buffer_in_use.variant(
    message=(
        "{ranks:change} the buffer of {calls}{early}: before wait(), the call may read the old "
        "or the new values."
    ),
    remedy=(
        "Call wait() on the request that {name} returned before you change its tensor, or pass a "
        "copy."
    ),
)


buffer_overwritten = buffer_in_use.variant(
    message="{ranks:change} the buffer of {calls}{early}: the message may overwrite it.",
    remedy="Call wait() on the request that {name} returned before you change its tensor.",
)


not_waited = Rule(
    "DK309",
    "not_waited",
    """A program never waits for an asynchronous call.

    `isend`, `irecv` and calls with `async_op=True` return a request immediately. The transfer is
    complete only when `wait()` of the request returns.

    ```python
    request = dist.isend(x, dst=1)
    request.wait()
    ```

    torch does not report this, and the last messages may be lost when the process ends.
    """,
    message="{calls}{used}.",
    remedy=(
        "Call wait() on the requests that isend and irecv return: only then is the transfer "
        "complete."
    ),
    used="; the tensor is used{where:at}",
)


left_behind = not_waited.variant(
    message="rank {span.rank} finished without waiting for its i{span}; {other:wait in}.",
)


barrier_not_waited = not_waited.variant(
    message="{calls}: the program continues without the other ranks.",
    remedy="Call wait() on the request that it returns, or omit async_op.",
)


result_not_waited = not_waited.variant(
    message="{calls}: its result may be incomplete when the tensor is used{where:at}.",
    remedy="Call wait() on the request that it returns before you use the tensor.",
)


# -- DK4xx: groups and stores -----------------------------------------------------------------


wrong_group = Rule(
    "DK401",
    "wrong_group",
    """Ranks make the same call on different groups.

    A collective is matched within its group. Two groups of the same ranks are different groups, and
    each member of a group must call all of its collectives.

    Pass the same group on every rank:

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
        f"{wrong_group.remedy} Each new_group creates a different group: use them in the same "
        "order on every rank."
    ),
)


member_missing = wrong_group.variant(
    message=divergence.message,
    remedy=(
        "Every member of a group must call its collectives, and only members can: compare the "
        "ranks of the group with the ranks that reach this call."
    ),
)


new_group = Rule(
    "DK402",
    "new_group",
    """Not every rank of the world calls new_group, or the ranks pass different members.

    `new_group` is a collective of all ranks, members or not. torch names groups by counting these
    calls, so a rank that skips one has different names for all later groups.

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
    message="{here:call}: all ranks must pass the same members.",
    remedy="Call new_group with the same ranks on every rank of the world.",
)


leaked_group = Rule(
    "DK403",
    "leaked_group",
    """A line repeatedly creates groups without destroying them.

    torch keeps every group, with its connections and threads, until `destroy_process_group`. In a
    loop, they exhaust file descriptors and memory.

    ```python
    group = dist.new_group()  # once, before the loop
    for batch in batches:
        dist.all_reduce(x, group=group)
    ```

    torch does not report this until it reaches the system's limits.
    """,
    message=(
        "{ranks:create} groups repeatedly with {call}{where:at}; at least {n} are still alive: "
        "torch keeps each with its connections and threads."
    ),
    remedy=(
        "Create the group once, before the loop, or call dist.destroy_process_group(group) when it "
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
    message="{here:call} on a group without {ranks}: the call has no effect.",
    remedy="Call it only on members of the group, or add {ranks} to the group.",
)


destroyed_group = Rule(
    "DK405",
    "destroyed_group",
    """A group is used after one of its members has destroyed it.

    `destroy_process_group` closes the rank's connections in the group: the others then wait for a
    rank that has left it. The rank itself gets an error at its next call.

    Destroy it once, at the end, on every member:

    ```python
    dist.all_reduce(x, group=group)
    dist.barrier()
    dist.destroy_process_group(group)
    ```

    Plain torch reports `Invalid process group specified`, or blocks on the other ranks.
    """,
    message="{ranks:have} destroyed {group}{where:at}; {here:wait in}.",
    remedy=(
        "Call destroy_process_group on every member only after the last call on the group: move it "
        "there."
    ),
)


used_after_destroy = destroyed_group.variant(
    message="{here:call} on a group that {they} destroyed{where:at}.",
    remedy="Call destroy_process_group once, after the last use of the group.",
)


destroyed_too_early = destroyed_group.variant(
    message="{ranks:destroy} a group{where:at} before waiting for {name}{call.where:at} on it.",
    remedy="Call wait() on pending requests before destroy_process_group.",
)


missing_key = Rule(
    "DK406",
    "missing_key",
    """Ranks wait for a key of a store that no rank sets.

    `store.get` and `store.wait` block until some rank has called `store.set` with the same key.
    Look for a different spelling, or for a condition that skips `set`.

    ```python
    if rank == 0:
        store.set("ready", "yes")
    store.get("ready")
    ```

    Plain torch reports a timeout of the store and the key.
    """,
    message="{here:wait in}, but no rank has set {keys}{near}{others}.",
    remedy=(
        "Set {keys} on one rank before the others need it: look for a different spelling, or for "
        "an `if` that skips store.set."
    ),
    near="; rank {set.rank} has called {call}{set.where:at}",
)


# -- DK5xx: gradients --------------------------------------------------------------------------


_LACKS = "{ranks:have} ended a backward pass without the gradients of some parameters{names}"

unused_parameter = Rule(
    "DK501",
    "unused_parameter",
    """A rank's loss does not depend on some parameters, so their gradients are never sent.

    DDP averages the gradients of a bucket when all of them are ready. If one rank does not use a
    layer, its bucket stays incomplete, and the other ranks wait for it.

    Use every parameter in every forward pass on every rank, even if multiplied by zero, or let DDP
    find unused parameters:

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


# -- DK6xx: the parameter server -----------------------------------------------------------------


unanswered = Rule(
    "",
    "unanswered",
    """A request to the parameter server waits for requests that other workers do not make.""",
    message="{here:wait in}{condition}, but {others}.",
)


missing_push = Rule(
    "DK601",
    "missing_push",
    """A worker pushes a key less often than the others, which wait for its gradient.

    Under `dist_sync`, a round of a key ends when every worker has pushed it once. Only then does
    the server answer the pulls of that round. Modes with bounded staleness also wait for gradients.

    Use the same number of batches on every worker, and push and pull the same keys:

    ```python
    for x, y in batches:  # the same number on every worker
        kv.push("w", gradient(x, y))
        kv.pull("w", out=w)
    ```

    or create the store as `dist_async`. MXNet's server waits forever.
    """,
    message=unanswered.message,
    remedy=(
        "Under dist_sync, every worker must push a key once per round: use the same number of "
        "batches on every rank, and look for an `if`, `break`, `return` or `continue` that only "
        "some ranks reach; or use dist_async, where no worker waits."
    ),
    bound=(
        "The staleness bound also applies to workers that have finished: use the same number of "
        "batches on every rank, or a larger staleness."
    ),
    barrier=(
        "The staleness bound also applies to workers that wait at a barrier: call barrier() after "
        "the same number of pushes on every rank."
    ),
)


missing_init = Rule(
    "DK602",
    "missing_init",
    """A worker does not call init for a key.

    Rank 0 passes the first value of a key, and `init` on the other workers waits for it.

    ```python
    kv.init("w", w)  # on every worker, outside of any `if`
    ```

    MXNet's workers wait forever.
    """,
    message=unanswered.message,
    remedy=(
        "Call init on every worker, outside of any `if`: the key gets the value that rank 0 passes."
    ),
)


missing_worker = Rule(
    "DK603",
    "missing_worker",
    """A worker does not create the store.

    The servers start when every worker has called `kvstore.create`.

    ```python
    kv = kvstore.create("dist_sync")  # on every worker, outside of any `if`
    ```

    MXNet's workers wait forever.
    """,
    message=unanswered.message,
    remedy="Create the store on every worker: the servers start when all workers have created it.",
)


# -- DK9xx: slow ranks and incomplete records ------------------------------------------------------


straggler = Rule(
    "DK901",
    "straggler",
    """A rank is slow, and the others wait for it.

    This is not a hang: the rank computes, reads data or sleeps, and repeatedly arrives after the
    others. A step takes as long as its slowest rank.

    Reduce its work, or find the cause of the delay, such as another process on its machine, larger
    batches or a slower disk.

    ```python
    with torch.profiler.profile() as profile:
        train(batches)
    ```

    torch does not report this.
    """,
    message="{here:wait in} for rank {rank}, which {is_} not communicating.",
    remedy="If it computes, this is not a hang: it may still arrive.",
)


late_again = straggler.variant(
    message=(
        "after the first one, rank {rank} arrived last at {late} of {total} collectives: the "
        "others waited {seconds:.2g} s for it in total."
    ),
    remedy="This is not a hang: reduce its work, or find the cause of the delay.",
)


not_judged = Rule(
    "DK903",
    "not_judged",
    """The record lacks data that a diagnosis needs.

    A record from another tool may lack the ends of calls, the members of groups, or some calls.
    distkit then reports the missing data instead of guessing, and how to record it next time.

    ```shell
    distkit trace -- torchrun --nproc-per-node 4 train.py
    ```

    This command records everything that a diagnosis needs.
    """,
    message="{text}",
    remedy="{advice}",
)
