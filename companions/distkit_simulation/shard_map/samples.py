"""A static scene that shows which samples each replica uses in each step.

The upper part has a cell for each sample, in the order of the data; the lower part has a row for
each replica.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from distkit._format import count
from distkit.data import Plan
from distkit.views.scene.frame import Json, clean
from distkit.views.scene.marks import Scene, Shape, path, picture, rect, text, title
from distkit.views.scene.renderer import cut
from distkit.views.scene.svg import text_width

#: WIDTH is the width of the drawing. LEFT and RIGHT are the edges of the area with the steps [px].
WIDTH, LEFT, RIGHT = 900, 92, 812
#: Maximum sizes [px]; each replica has a row.
MAX_SAMPLES_HEIGHT, MAX_ROW_HEIGHT, MAX_ROWS_HEIGHT, MAX_CELL = 190, 34, 176, 30
#: Samples are drawn as cells if there are at most MAX_SAMPLES. At most MAX_STEPS steps are drawn.
#: If there are at most MAX_FILES files, each starts a new line of cells.
MAX_SAMPLES, MAX_STEPS, MAX_FILES = 2_000, 400, 8
MAX_LABELED = 240  # maximum number of bars with labels
NAME_WIDTH = 110  # width of file names
DESCRIPTIONS = {
    "FILE": "Each replica reads separate files, which contain its part of each batch.",
    "DATA": "Each replica uses its part of each global batch, and skips the other samples.",
    "OFF": "Each replica reads all samples, so each sample is used {}.",
}


class Renderer:
    """Draws the plan of a dataset.

    Args:
        plan: the plan to draw.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.steps = plan, min(plan.steps, MAX_STEPS)
        self.rows = [
            [tuple(plan.rows(step, replica)) for step in range(self.steps)]
            for replica in range(plan.replicas)
        ]
        self.max_samples_per_step = max(
            (len(rows) for steps in self.rows for rows in steps), default=1
        )
        self.grid = Grid(plan.samples, plan.files) if 0 < plan.samples <= MAX_SAMPLES else None
        self.top = self.grid.height + 40 if self.grid else 26
        self.row_height = min(MAX_ROW_HEIGHT, MAX_ROWS_HEIGHT / plan.replicas)
        self.scene = Scene(WIDTH, self.top + self.row_height * plan.replicas + 6)

    def picture(self, name: str) -> Json:
        """Return the picture for the SVG and browser renderers, with the title ``name``."""
        if self.grid:
            self._samples(self.grid)
        for replica in range(self.plan.replicas):
            self._replica(replica, self.top + self.row_height * replica)
        for label, x, anchor in (
            ("step 1", LEFT, ""),
            (f"{self.steps:,}", RIGHT, "end"),
            ("samples", RIGHT + 10, ""),
        ):
            self.scene.add(x, self.top - 7, text(label, "small", anchor=anchor))
        return picture(
            self.scene,
            title=clean(name) or "Shard map",
            view="shards",
            facts=self._facts(),
            description=self._description(),
            empty="" if self.steps else "the dataset has no samples",
        )

    def _facts(self) -> list[str]:
        plan, steps = self.plan, count(self.plan.steps, "step")
        if self.steps < plan.steps:
            steps = f"the first {self.steps:,} of {steps}"
        return [
            count(plan.replicas, "replica"),
            plan.policy.value,
            *([count(len(plan.files), "file")] if plan.files else []),
            count(plan.samples, "sample"),
            f"{plan.global_batch:,} per step",
            steps,
        ]

    def _description(self) -> str:
        plan = self.plan
        description = DESCRIPTIONS.get(plan.policy.value, "").format(count(plan.replicas, "time"))
        order = f" Samples are in random order (seed {plan.seed}, epoch {plan.epoch})."
        return description + (order if plan.seed is not None else "")

    def _samples(self, grid: Grid) -> None:
        """Add a cell for each sample, divided among the replicas that use it."""
        used = Counter(s for steps in self.rows for rows in steps for s in rows)
        shared = self.plan.replicas if max(used.values(), default=1) > 1 else 1
        for replica, steps in enumerate(self.rows):
            area = grid.area(
                [s for rows in steps for s in rows], replica % shared / shared, 1 / shared
            )
            self.scene.add(0, 0, path(area, "own", lane=replica))
        self.scene.add(0, 0, *grid.labels())

    def _replica(self, replica: int, y: float) -> None:
        """Add the samples of a replica in each step as bars, or as a single path for many steps."""
        middle = self.row_height / 2 + 1.5
        self.scene.add(
            0,
            y,
            rect(11, 11, "own", x=2, y=middle - 9.5, r=3, lane=replica),
            text(f"replica {replica}", "small", x=20, y=middle),
            text(f"{sum(map(len, self.rows[replica])):,}", "small", x=RIGHT + 10, y=middle),
        )
        pitch, height, outline = (RIGHT - LEFT) / max(1, self.steps), self.row_height - 5, ""
        width = max(pitch - 1.5, 0.8 * pitch)
        for step, rows in enumerate(self.rows[replica]):
            x, bar = LEFT + step * pitch, height * max(0.1, len(rows) / self.max_samples_per_step)
            if self.steps * self.plan.replicas <= MAX_LABELED:
                self.scene.add(x, y, *self._bar(step, replica, width, height, bar))
            elif rows:
                outline += f"M{x:.4g} {height - bar:.3g}h{width:.3g}V{height:.3g}h{-width:.3g}z"
        self.scene.add(0, y, path(outline, "own", lane=replica))

    def _bar(
        self, step: int, replica: int, width: float, height: float, bar: float
    ) -> Iterator[Shape]:
        """Yield the samples of a replica in a step, with a label if it fits."""
        rows, label = self.rows[replica][step], f"step {step + 1}, replica {replica}"
        yield title(f"{label}: {count(len(rows), 'sample')}: {format_rows(rows, 12)}".rstrip(": "))
        if not rows:
            yield rect(width, height, "slot", r=2)
            return
        yield rect(width, bar, "own", y=height - bar, lane=replica, r=min(2.0, width / 4))
        x, y, labels = width / 2, height - bar / 2 + 4, (format_rows(rows, 9), format_rows(rows, 3))
        for caption in (*labels, count(len(rows), "sample"), str(len(rows))):
            if text_width(caption, 11) < width - 4 and bar > 12:
                yield text(caption, "label", x=x, y=y, anchor="middle", lane=replica)
                return


class Grid:
    """The cells of samples, in lines. If there are only a few files, each starts a new line.

    Args:
        samples: the number of samples.
        files: the name and number of samples of each file, if the dataset has files.
    """

    def __init__(self, samples: int, files: Sequence[tuple[str, int]] = ()) -> None:
        self.files = list(files) if 1 < len(files) <= MAX_FILES else [("", samples)]
        left = NAME_WIDTH if len(self.files) > 1 else 2
        sizes = [size for _, size in self.files]
        for half in range(2 * MAX_CELL, 1, -1):
            self.cell, columns = half / 2, int((WIDTH - left - 2) / (half / 2))
            lines = list(accumulate((-(-size // columns) for size in sizes), initial=0))
            if lines[-1] * self.cell <= MAX_SAMPLES_HEIGHT:
                break
        self.lines, self.height = lines, lines[-1] * self.cell
        #: The top left corner of each sample's cell.
        self.corners = [
            (left + i % columns * self.cell, (first + i // columns) * self.cell)
            for size, first in zip(sizes, lines, strict=False)
            for i in range(size)
        ]

    def area(self, samples: Sequence[int], top: float, fraction: float) -> str:
        """Return a path that fills a fraction of each sample's cell, starting at ``top``."""
        edge = self.cell - min(1.0, self.cell / 8)
        return "".join(
            f"M{x:g} {y + top * edge:.4g}h{edge:g}v{fraction * edge:.4g}h{-edge:g}z"
            for x, y in (self.corners[s] for s in samples)
        )

    def labels(self) -> Iterator[Shape]:
        """Yield the names of files, and the indices of samples if they fit."""
        for (name, _), first in zip(self.files, self.lines, strict=False):
            label = cut(name.rpartition("/")[2], NAME_WIDTH - 12, 12)
            yield text(label, "words", x=2, y=(first + 0.5) * self.cell + 4)
        if text_width(str(len(self.corners)), 11) < self.cell - 3:
            for sample, (left, top) in enumerate(self.corners):
                x, y = left + self.cell / 2, top + self.cell / 2 + 4
                yield text(str(sample), "chunk", x=x, y=y, anchor="middle", size=11)


def format_rows(rows: Sequence[int], limit: int) -> str:
    """Format samples as a range, a stride, or at most ``limit`` numbers.

    >>> format_rows([4, 5, 6, 7], 3), format_rows([0, 4, 8, 12], 3)
    ('4–7', '0, 4 … 12')
    >>> format_rows([7, 1, 9, 3], 3), format_rows([5], 1)
    ('7, 1, 9 …', '5')
    """
    numbers = [str(row) for row in rows]
    if len(rows) <= 2 or (len(rows) <= limit and rows[1] - rows[0] != 1):
        return ", ".join(numbers)
    strides = {b - a for a, b in pairwise(rows)}
    if strides == {1}:
        return f"{numbers[0]}–{numbers[-1]}"
    if len(strides) == 1:
        return f"{numbers[0]}, {numbers[1]} … {numbers[-1]}"
    return f"{', '.join(numbers[:limit])} …"


def describe(plan: Plan) -> Iterator[str]:
    """Yield lines of text with the samples of each replica in the first two steps and the last."""
    steps = range(plan.steps)
    for replica, share in enumerate(plan.shares):
        yield f"replica {replica}: {count(share, 'sample')}"
        for step in (*steps[:2], *steps[2:][-1:]):
            yield f"  step {step + 1}: {format_rows(plan.rows(step, replica), 8) or 'none'}"
