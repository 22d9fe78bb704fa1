"""The samples of a dataset that each replica uses in each step, as a static scene.

The upper part has a cell for each sample, in the order of the data; the lower a row per replica.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from distkit._format import count
from distkit.data.policies import Plan
from distkit.views.scene.frame import Json, clean
from distkit.views.scene.marks import Scene, Shape, path, picture, rect, text, title
from distkit.views.scene.painter import cut
from distkit.views.scene.svg import text_width

WIDTH, LEFT, RIGHT = 900, 92, 812  # of the field; of the steps
#: Largest heights of all samples, of a row and of all rows; the largest cell.
SAMPLES, ROW, ROWS, LARGEST = 190, 34, 176, 30
#: The largest numbers of cells for samples, of drawn steps, and of files with separate lines.
MOST, STEPS, FILES = 2_000, 400, 8
DENSE = 240  # pieces; more have no labels
NAMES = 110  # width of the files' names
SAID = {
    "FILE": "Each replica reads files of its own, and takes its piece of each batch from them.",
    "DATA": "Each replica takes its piece of each global batch, and skips the samples of others.",
    "OFF": "Each replica reads all samples: nothing is divided, and each sample counts {} times.",
}


class Painter:
    """Makes the picture of a plan.

    Args:
        plan: the plan of a dataset.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.steps = plan, min(plan.steps, STEPS)
        self.rows = [
            [tuple(plan.rows(step, replica)) for step in range(self.steps)]
            for replica in range(plan.replicas)
        ]
        self.most = max((len(rows) for mine in self.rows for rows in mine), default=1)
        few = 0 < (plan.samples or 0) <= MOST
        self.grid = Grid(plan.samples or 0, plan.files) if few else None
        self.top = self.grid.height + 40 if self.grid else 26
        self.high = min(ROW, ROWS / plan.replicas)
        self.scene = Scene(WIDTH, self.top + self.high * plan.replicas + 6)

    def picture(self, name: str) -> Json:
        """The picture, for both painters; ``name`` is its title."""
        if self.grid:
            self._samples(self.grid)
        for replica in range(self.plan.replicas):
            self._replica(replica, self.top + self.high * replica)
        heads = ("step 1", LEFT, ""), (f"{self.steps:,}", RIGHT, "end"), ("samples", RIGHT + 10, "")
        for words, x, anchor in heads:
            self.scene.add(x, self.top - 7, text(words, "small", anchor=anchor))
        return picture(
            self.scene,
            title=clean(name) or "Shard map",
            view="shards",
            facts=self._facts(),
            said=self._said(),
            empty="" if self.steps else "these data have no samples",
        )

    def _facts(self) -> list[str]:
        plan, steps = self.plan, count(self.plan.steps, "step")
        if self.steps < plan.steps:
            steps = f"the first {self.steps:,} of {steps}"
        return [
            count(plan.replicas, "replica"),
            plan.policy.value,
            *([count(len(plan.files), "file")] if plan.files else []),
            count(plan.samples or 0, "sample"),
            f"{plan.global_batch:,} per step",
            steps,
        ]

    def _said(self) -> str:
        plan = self.plan
        words = SAID.get(plan.policy.value, "")
        order = f" In a random order (seed {plan.seed}, epoch {plan.epoch})."
        return words.format(plan.replicas) + (order if plan.seed is not None else "")

    def _samples(self, grid: Grid) -> None:
        """A cell for each sample, divided between the replicas that use it."""
        used = Counter(s for mine in self.rows for rows in mine for s in rows)
        shared = self.plan.replicas if max(used.values(), default=1) > 1 else 1
        for replica, mine in enumerate(self.rows):
            whole = [s for rows in mine for s in rows]
            area = grid.area(whole, replica % shared / shared, 1 / shared)
            self.scene.add(0, 0, path(area, "own", lane=replica))
        self.scene.add(0, 0, *grid.words())

    def _replica(self, replica: int, y: float) -> None:
        """The samples of a replica in each step, as bars; very many as a single path."""
        middle = self.high / 2 + 1.5
        self.scene.add(
            0,
            y,
            rect(11, 11, "own", x=2, y=middle - 9.5, r=3, lane=replica),
            text(f"replica {replica}", "small", x=20, y=middle),
            text(f"{sum(map(len, self.rows[replica])):,}", "small", x=RIGHT + 10, y=middle),
        )
        pitch, high, d = (RIGHT - LEFT) / max(1, self.steps), self.high - 5, ""
        wide = max(pitch - 1.5, 0.8 * pitch)
        for step, rows in enumerate(self.rows[replica]):
            x, tall = LEFT + step * pitch, high * max(0.1, len(rows) / self.most)
            if self.steps * self.plan.replicas <= DENSE:
                self.scene.add(x, y, *self._piece(step, replica, wide, high, tall))
            elif rows:
                d += f"M{x:.4g} {high - tall:.3g}h{wide:.3g}V{high:.3g}h{-wide:.3g}z"
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
    """

    def __init__(self, samples: int, files: Sequence[tuple[str, int]] = ()) -> None:
        self.files = list(files) if 1 < len(files) <= FILES else [("", samples)]
        left = NAMES if len(self.files) > 1 else 2
        sizes = [size for _, size in self.files]
        for half in range(2 * LARGEST, 1, -1):
            self.cell, columns = half / 2, int((WIDTH - left - 2) / (half / 2))
            lines = list(accumulate((-(-size // columns) for size in sizes), initial=0))
            if lines[-1] * self.cell <= SAMPLES:
                break
        self.lines, self.height = lines, lines[-1] * self.cell
        #: The corner of each sample's cell.
        self.places = [
            (left + i % columns * self.cell, (first + i // columns) * self.cell)
            for size, first in zip(sizes, lines, strict=False)
            for i in range(size)
        ]

    def area(self, samples: Sequence[int], top: float, part: float) -> str:
        """A path of the cells of samples, or of a ``part`` of each from its ``top`` on."""
        edge = self.cell - min(1.0, self.cell / 8)
        return "".join(
            f"M{x:g} {y + top * edge:.4g}h{edge:g}v{part * edge:.4g}h{-edge:g}z"
            for x, y in (self.places[s] for s in samples)
        )

    def words(self) -> Iterator[Shape]:
        """The names of files, and the numbers of samples if they fit."""
        for (name, _), first in zip(self.files, self.lines, strict=False):
            told = cut(name.rpartition("/")[2], NAMES - 12, 12)
            yield text(told, "words", x=2, y=(first + 0.5) * self.cell + 4)
        if text_width(str(len(self.places)), 11) < self.cell - 3:
            for sample, (left, top) in enumerate(self.places):
                x, y = left + self.cell / 2, top + self.cell / 2 + 4
                yield text(str(sample), "chunk", x=x, y=y, anchor="middle", size=11)


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
