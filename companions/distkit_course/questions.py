"""The free-text questions of the lessons, and the exercises of each lesson.

``questions.md`` has a heading for each lesson, followed by the names of its checked exercises and
its questions. Each question has a hint and sample answers at three levels.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from distkit.errors import DistkitError
from distkit_course import content

#: The levels of sample answers, from best to worst.
LEVELS = ("excellent", "good", "acceptable")


@dataclass(frozen=True)
class Question:
    """A free-text question, which is not judged automatically."""

    name: str
    question: str
    hints: tuple[str]
    excellent: str
    good: str
    acceptable: str

    @property
    def title(self) -> str:
        """The title in a list."""
        return self.question.partition("? ")[0].split("\n")[0][:90]

    @property
    def answers(self) -> str:
        """The sample answers at all levels."""
        return "\n\n".join(f"{level}: {getattr(self, level)}" for level in LEVELS)


def sections(file: str) -> Iterator[tuple[str, str, list[tuple[str, str]]]]:
    """Yield each lesson of a Markdown file: its name, its text, and its titled sections."""
    text = Path(content.__file__).with_name(file).read_text(encoding="utf-8")
    for lesson in re.split(r"^## ", text, flags=re.M)[1:]:
        head, *parts = re.split(r"^### ", lesson, flags=re.M)
        name, _, intro = head.partition("\n")
        titled = (part.partition("\n") for part in parts)
        yield name.strip(), intro, [(title.strip(), body) for title, _, body in titled]


def _question(name: str, body: str) -> Question:
    question, *items = (" ".join(p.split()) for p in re.split(r"^- ", body, flags=re.M))
    fields = dict(item.split(": ", 1) for item in items)
    return Question(name, question, (fields.pop("hint"),), **fields)


_lessons = [
    (lesson, re.findall(r"`(\w+)`", checked), [_question(*part) for part in parts])
    for lesson, checked, parts in sections("questions.md")
]

#: Every question by name.
QUESTIONS = {question.name: question for _, _, questions in _lessons for question in questions}

#: The names of each lesson's exercises and questions, in order.
LESSONS = {
    lesson: [*checked, *(question.name for question in questions)]
    for lesson, checked, questions in _lessons
}


def lessons(prefixes: Iterable[str]) -> list[str]:
    """Return the lessons with one of these prefixes, such as "02"; all lessons if there are none.

    Raises:
        DistkitError: no lesson has one of the prefixes.
    """
    wanted = tuple(prefixes)
    for prefix in wanted:
        if not any(lesson.startswith(prefix) for lesson in LESSONS):
            raise DistkitError(
                f"no lesson starts with {prefix!r}. Available: {', '.join(LESSONS)}."
            )
    return [lesson for lesson in LESSONS if not wanted or lesson.startswith(wanted)]
