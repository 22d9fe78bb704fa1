"""The course: exercises and their judges, predictions, quizzes, and grading.

This package defines ``dk.check``, ``dk.hint``, ``dk.solution``, ``dk.predict`` and
``dk.concept_check``. The exercises are in :mod:`distkit_course.content`, which is the folder
``notebooks/course``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distkit.imports import attributes

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
