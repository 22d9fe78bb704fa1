"""The course: exercises and their judges, predictions, quizzes, grading.

``dk.check``, ``dk.hint``, ``dk.solution``, ``dk.predict`` and ``dk.concept_check`` come from here.
The exercises themselves are in :mod:`distkit_course.content`, the folder ``notebooks/course``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distkit.companions import attributes

if TYPE_CHECKING:
    from distkit_course.exercises import check, hint, solution
    from distkit_course.predictions import predict
    from distkit_course.quizzes import concept_check

__all__ = ["check", "concept_check", "hint", "predict", "solution"]

__getattr__ = attributes(
    __name__,
    {
        **dict.fromkeys(("check", "hint", "solution"), "distkit_course.exercises"),
        "concept_check": "distkit_course.quizzes",
        "predict": "distkit_course.predictions",
    },
)
