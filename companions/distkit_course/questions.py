"""The questions of the lessons that are answered in words, and which exercise belongs to which.

They are in ``questions.md``: a heading for each lesson with the names of its checked exercises,
then each question, with a hint and answers of three levels to compare one's own with.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from distkit.errors import DistkitError
from distkit_course import content

#: The levels of an answer, the best first.
LEVELS = ("excellent", "good", "acceptable")


@dataclass(frozen=True)
class Question:
    """A question whose answer nobody but a reader can judge."""

    name: str
    question: str
    hints: tuple[str]
    excellent: str
    good: str
    acceptable: str

    @property
    def title(self) -> str:
        """A few words for a list."""
        return self.question.partition("? ")[0].split("\n")[0][:90]

    @property
    def answers(self) -> str:
        """All three."""
        return "\n\n".join(f"{level}: {getattr(self, level)}" for level in LEVELS)


def sections(file: str) -> Iterator[tuple[str, str, list[tuple[str, str]]]]:
    """Each lesson in a Markdown file of the content: its name, its text, and its parts by title."""
    text = Path(content.__file__).with_name(file).read_text(encoding="utf-8")
    for lesson in re.split(r"^## ", text, flags=re.M)[1:]:
        head, *parts = re.split(r"^### ", lesson, flags=re.M)
        name, _, below = head.partition("\n")
        titled = (part.partition("\n") for part in parts)
        yield name.strip(), below, [(title.strip(), body) for title, _, body in titled]


def _question(name: str, body: str) -> Question:
    question, *rest = (" ".join(p.split()) for p in re.split(r"^- ", body, flags=re.M))
    said = dict(line.split(": ", 1) for line in rest)
    return Question(name, question, (said.pop("hint"),), **said)


_lessons = [
    (lesson, re.findall(r"`(\w+)`", checked), [_question(*part) for part in parts])
    for lesson, checked, parts in sections("questions.md")
]

#: Every question by name.
QUESTIONS = {one.name: one for _, _, questions in _lessons for one in questions}

#: The names of each lesson's exercises and questions, in their order.
LESSONS = {
    lesson: [*checked, *(one.name for one in questions)] for lesson, checked, questions in _lessons
}


def lessons(begins: Iterable[str]) -> list[str]:
    """The lessons whose names begin so, such as "02"; all when there are no beginnings.

    Raises:
        DistkitError: there is no such lesson.
    """
    chosen = tuple(begins)
    for begin in chosen:
        if not any(lesson.startswith(begin) for lesson in LESSONS):
            raise DistkitError(f"there is no lesson {begin!r}. There are: {', '.join(LESSONS)}.")
    return [lesson for lesson in LESSONS if not chosen or lesson.startswith(chosen)]
