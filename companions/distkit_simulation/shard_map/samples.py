"""The samples of a dataset that each replica uses in each step, as an animated scene.

The upper part has a cell for each sample, in the order of the data; the lower a row per replica.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise

from distkit._format import count, joined
from distkit.data.policies import Plan
from distkit.views.scene.frame import Json, clean
from distkit.views.scene.marks import Scene, Shape, line, path, picture, rect, text, title
from distkit.views.scene.painter import cut
from distkit.views.scene.svg import text_width

WIDTH, LEFT, RIGHT = 900, 92, 812  # of the field; of the steps
#: Largest heights of all samples, of a row and of all rows; the largest cell.
SAMPLES, ROW, ROWS, LARGEST = 190, 34, 176, 30
#: The largest numbers of cells for samples, of drawn steps, and of files with separate lines.
MOST, STEPS, FILES = 20_000, 400, 8
DENSE = 240  # pieces; more have no labels
SOON = 0.01  # steps: a step appears this long after its begin
NAMES = 110  # width of the files' names
GRID, NUMBER, CURSOR, NOW = range(4)  # layers, from the lowest
SAID = {
    "FILE": "Each replica reads files of its own, and takes its piece of each batch from them.",
    "DATA": "Each replica takes its piece of each global batch, and skips the samples of others.",
    "OFF": "Each replica reads all samples: nothing is divided, and each sample counts {} times.",
}
#: A rectangle of cells: column and line of the first, numbers of columns and lines.
Run = tuple[int, int, int, int]


class Painter:
    """Makes the picture of a plan.

    Args:
        plan: the plan of a dataset.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.steps = plan, min(plan.steps, STEPS)
        self.samples = plan.samples or 0
        self.rows = [
            [tuple(plan.rows(step, replica)) for step in range(self.steps)]
            for replica in range(plan.replicas)
        ]
        apart = plan.replicas if plan.seed is None else 1
        self.most = max((len(rows) for mine in self.rows for rows in mine), default=1)
        few = 0 < self.samples <= MOST
        self.grid = Grid(self.samples, plan.files, apart) if few else None
        self.top = self.grid.height + 40 if self.grid else 26
        self.high = min(ROW, ROWS / plan.replicas)
        self.scene = Scene(WIDTH, self.top + self.high * plan.replicas + 6)

    def picture(self, name: str) -> Json:
        """The picture, for both painters; ``name`` is its title."""
        if self.grid:
            self._samples(self.grid)
        self._replicas()
        return picture(
            self.scene,
            title=clean(name) or "Shard map",
            view="shards",
            end=float(self.steps),
            facts=self._facts(),
            said=self._said(),
            empty="" if self.steps else "these data have no samples",
            legend=list(self._legend()),
            unit="step",
            before="before the first step",
            keyframes=[self._keyframe(step) for step in range(self.steps)],
            scale=[LEFT / WIDTH, RIGHT / WIDTH],
        )

    # -- in words ---------------------------------------------------------------------------

    def _facts(self) -> list[str]:
        plan, names = self.plan, [self.plan.policy.value]
        files = [count(len(plan.files), "file")] if plan.files else []
        steps = count(plan.steps, "step")
        if self.steps < plan.steps:
            steps = f"the first {self.steps:,} of {steps}"
        return [
            count(plan.replicas, "replica"),
            *names,
            *files,
            count(self.samples, "sample"),
            f"{plan.global_batch:,} per step",
            steps,
        ]

    def _said(self) -> str:
        plan = self.plan
        words = SAID.get(plan.policy.value, "")
        order = f" In a random order (seed {plan.seed}, epoch {plan.epoch})."
        return words.format(plan.replicas) + (order if plan.seed is not None else "")

    def _legend(self) -> Iterator[tuple[list[Shape], float, str]]:
        for style, words in (("pale", "still to come"), ("own", "used")):
            yield [rect(14, 14, style, x=1, y=3, r=2)], 16, words
        yield [rect(14, 14, "own", x=1, y=3), rect(15, 15, "fresh", x=0.5, y=2.5)], 17, "this step"

    def _keyframe(self, step: int) -> Json:
        sizes = [len(mine[step]) for mine in self.rows]
        same = len({*sizes}) == 1
        each = f"{sizes[0]} each" if same else joined([f"{n:,}" for n in sizes])
        who, at = f"step {step + 1}: {count(sum(sizes), 'sample')}", float(step + 1)
        return {"begin": float(step), "end": at, "who": who, "more": f"by replica: {each}"}

    # -- the samples ------------------------------------------------------------------------

    def _samples(self, grid: Grid) -> None:
        """A cell for each sample, with a layer for each replica that uses it."""
        used = Counter(s for mine in self.rows for rows in mine for s in rows)
        layers = self.plan.replicas if max(used.values(), default=1) > 1 else 1
        self.scene.add(0, 0, *grid.frame(), layer=GRID)
        last = float(self.steps)
        for replica, mine in enumerate(self.rows):
            layer = (replica % layers, layers)
            whole = [s for rows in mine for s in rows]
            for style, begin, end in (("toned", 0.0, last), ("solid", last, None)):
                shape = grid.area(whole, style, replica, layer)
                self.scene.add(0, 0, shape, begin=begin, end=end, layer=GRID)
            for step, rows in enumerate(mine):
                if rows:
                    area = grid.area(rows, "solid", replica, layer)
                    self.scene.add(0, 0, area, begin=step + SOON, end=last, layer=GRID)
                    self._now(step, 0, 0, grid.outline(rows, replica, layer))
        self.scene.add(0, 0, *grid.numbers(), layer=NUMBER)

    def _now(self, step: int, x: float, y: float, *drawing: Shape) -> None:
        """Draw during a step and in the frame held at its end."""
        begin, end = step + SOON, float(step + 1)
        self.scene.add(x, y, *drawing, begin=begin, end=end, layer=NOW)
        self.scene.hold_frame(step, x, y, *drawing, layer=NOW)

    # -- the replicas -----------------------------------------------------------------------

    def _replicas(self) -> None:
        for replica in range(self.plan.replicas):
            y, middle = self.top + self.high * replica, self.high / 2 + 1.5
            self.scene.add(
                0,
                y,
                rect(11, 11, "own", x=2, y=middle - 9.5, r=3, lane=replica),
                text(f"replica {replica}", "small", x=20, y=middle),
                text(f"{sum(map(len, self.rows[replica])):,}", "small", x=RIGHT + 10, y=middle),
            )
            self._steps(replica, y)
        heads = ("step 1", LEFT, ""), (f"{self.steps:,}", RIGHT, "end"), ("samples", RIGHT + 10, "")
        for words, x, anchor in heads:
            self.scene.add(x, self.top - 7, text(words, "small", anchor=anchor))
        cursor = line((0, 0), (0, self.high * self.plan.replicas), "answer")
        (x, y), to, end = (LEFT, self.top - 2), (RIGHT, self.top - 2), float(self.steps)
        self.scene.add(x, y, cursor, begin=0.0, end=end, to=to, steady=True, layer=CURSOR)

    def _steps(self, replica: int, y: float) -> None:
        """A replica's bar for each step, by number of samples; very many as a single path."""
        pitch, high, d = (RIGHT - LEFT) / max(1, self.steps), self.high - 5, ""
        wide = max(pitch - 1.5, 0.8 * pitch)
        for step, rows in enumerate(self.rows[replica]):
            x, tall = LEFT + step * pitch, high * max(0.1, len(rows) / self.most)
            if self.steps * self.plan.replicas <= DENSE:
                self.scene.add(x, y, *self._piece(step, replica, wide, high, tall))
            elif rows:
                d += f"M{x:.4g} {high - tall:.3g}h{wide:.3g}V{high:.3g}h{-wide:.3g}z"
            edge = rect(wide + 2, tall + 2, "fresh", x=-1, y=high - tall - 1, r=2)
            full = rect(wide, tall, "full", y=high - tall)
            self._now(step, x, y, *[edge if wide > 5 else full] * bool(rows))
        if d:
            self.scene.add(0, y, path(d, "own", lane=replica))

    def _piece(
        self, step: int, replica: int, wide: float, high: float, tall: float
    ) -> Iterator[Shape]:
        """The samples of a replica in a step, labelled if space permits."""
        rows, told = self.rows[replica][step], f"step {step + 1}, replica {replica}"
        yield title(f"{told}: {count(len(rows), 'sample')}: {listed(rows, 12)}".rstrip(": "))
        if not rows:
            yield rect(wide, high, "slot", r=2)
            return
        yield rect(wide, tall, "own", y=high - tall, lane=replica, r=min(2.0, wide / 4))
        x, y, labels = wide / 2, high - tall / 2 + 4, (listed(rows, 9), listed(rows, 3))
        for words in (*labels, count(len(rows), "sample"), str(len(rows))):
            if text_width(words, 11) < wide - 4 and tall > 12:
                yield text(words, "label", x=x, y=y, anchor="middle", lane=replica)
                return


class Grid:
    """The cells of samples, in lines; a few files each start on a new line.

    Args:
        samples: number of samples.
        files: name and number of samples of each file, if there are files.
        apart: the number that divides the samples of a line, if possible.
    """

    def __init__(self, samples: int, files: Sequence[tuple[str, int]] = (), apart: int = 1) -> None:
        self.files = list(files) if 1 < len(files) <= FILES else [("", samples)]
        self.left = NAMES if len(self.files) > 1 else 2
        self.cell, self.columns = self._fitting(apart)
        sizes = [size for _, size in self.files]
        self.starts = list(accumulate(sizes, initial=0))
        self.lines = list(accumulate((-(-size // self.columns) for size in sizes), initial=0))
        self.height = self.lines[-1] * self.cell
        #: Column and line of each sample.
        self.places = [
            (i % self.columns, line_ + i // self.columns)
            for size, line_ in zip(sizes, self.lines, strict=False)
            for i in range(size)
        ]

    def _fitting(self, apart: int) -> tuple[float, int]:
        """The size of the largest cells that fit, and their number in a line."""
        room = WIDTH - self.left - 2
        for half in range(2 * LARGEST, 1, -1):
            cell, columns = half / 2, int(room / (half / 2))
            columns -= columns % apart if columns > 2 * apart else 0
            if sum(-(-size // columns) for _, size in self.files) * cell <= SAMPLES:
                break
        return cell, columns

    def runs(self, samples: Iterable[int]) -> list[Run]:
        """Merge neighbours in lines or in columns, whichever gives fewer.

        >>> Grid(100).runs([1, 0, 2, 5])
        [(0, 0, 3, 1), (5, 0, 1, 1)]
        """
        places = [self.places[s] for s in samples]
        across = [(x, y, n, 1) for y, x, n in _joined((y, x) for x, y in places)]
        down = [(x, y, 1, n) for x, y, n in _joined(places)]
        return min(across, down, key=len)

    def area(self, samples: Iterable[int], style: str, lane: int, layer: tuple[int, int]) -> Shape:
        """The cells of samples, or a layer of them, as thick lines in units of cells."""
        nth, of = layer
        d, before = "", (0.0, 0.0)
        for x, y, w, h in self.runs(samples):
            at = (x, y + (nth + 0.5) / of) if h == 1 else (x + 0.5, y)
            d += f"m{at[0] - before[0]:g} {at[1] - before[1]:g}" + (f"h{w}" if h == 1 else f"v{h}")
            before = (at[0] + w, at[1]) if h == 1 else (at[0], at[1] + h)
        scale = f"translate({self.left:g} 0) scale({self.cell:g})"
        thick = round(1 / of, 3)
        return "path", style, lane, (("d", d), ("transform", scale), ("stroke-width", thick)), ""

    def outline(self, samples: Iterable[int], lane: int, layer: tuple[int, int]) -> Shape:
        """The edges of cells, or their areas if cells are small."""
        if self.cell < 6:
            return self.area(samples, "inked", lane, layer)
        c = self.cell
        d = "".join(
            f"M{self.left + x * c:g} {y * c:g}h{w * c:g}v{h * c:g}h{-w * c:g}z"
            for x, y, w, h in self.runs(samples)
        )
        return path(d, "fresh")

    def frame(self) -> Iterator[Shape]:
        """The names of the files."""
        for (name, size), start, line_ in zip(self.files, self.starts, self.lines, strict=False):
            if len(self.files) > 1:
                told = cut(name.rpartition("/")[2], NAMES - 12, 12)
                yield title(f"{name}: samples {start:,} to {start + size - 1:,}")
                yield text(told, "words", x=2, y=(line_ + 0.5) * self.cell + 4)

    def numbers(self) -> Iterator[Shape]:
        """The edges between cells, and the numbers of samples if they fit."""
        c, last = self.cell, len(self.places) - 1
        if c < 6:
            return
        sides = (f"M{self.left + x * c:g} {y * c:g}v{c:g}" for x, y in self.places if x)
        lines = (f"M{self.left} {y * c:g}h{self.columns * c:g}" for y in range(1, self.lines[-1]))
        yield path("".join([*sides, *lines]), "cut")
        if text_width(str(last), 11) > c - 3:
            return
        for sample, (column, row) in enumerate(self.places):
            x, y = self.left + (column + 0.5) * c, (row + 0.5) * c + 4
            yield text(str(sample), "chunk", x=x, y=y, anchor="middle", size=11)


def _joined(places: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Merge neighbours in the second coordinate: both coordinates and the count."""
    found: list[tuple[int, int, int]] = []
    for a, b in sorted(places):
        if found and (found[-1][0], found[-1][1] + found[-1][2]) == (a, b):
            found[-1] = *found[-1][:2], found[-1][2] + 1
        else:
            found.append((a, b, 1))
    return found


def listed(rows: Sequence[int], most: int) -> str:
    """Samples as text: ranges, steps, or at most ``most`` numbers.

    >>> listed([4, 5, 6, 7], 3), listed([0, 4, 8, 12], 3), listed([7, 1, 9, 3], 3), listed([5], 1)
    ('4–7', '0, 4 … 12', '7, 1, 9 …', '5')
    """
    told = [str(row) for row in rows]
    if len(rows) <= 2 or (len(rows) <= most and rows[1] - rows[0] != 1):
        return ", ".join(told)
    apart = {b - a for a, b in pairwise(rows)}
    if apart == {1}:
        return f"{told[0]}–{told[-1]}"
    if len(apart) == 1:
        return f"{told[0]}, {told[1]} … {told[-1]}"
    return f"{', '.join(told[:most])} …"


def describe(plan: Plan) -> Iterator[str]:
    """Lines of text: the samples of each replica in the first two steps and the last."""
    steps = range(plan.steps)
    for replica, share in enumerate(plan.shares):
        yield f"replica {replica}: {count(share, 'sample')}"
        for step in (*steps[:2], *steps[2:][-1:]):
            yield f"  step {step + 1}: {listed(plan.rows(step, replica), 8) or 'none'}"
