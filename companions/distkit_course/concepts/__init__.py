"""Concept checks: five questions about a run that was not seen before, answered by looking.

Example::

    dk.concept_check("01_messages")                 # its picture, and five questions
    check.answer(1, "rank 2")                       # the same in code, counted from 1
"""

from __future__ import annotations

from distkit.errors import DistkitError
from distkit_course.concepts import messages, models, strategies, systems
from distkit_course.concepts.concept import Concept, ConceptCheck

__all__ = ["CONCEPTS", "concept_check"]

#: The concept check of each lesson; a file for each group of lessons.
CONCEPTS: dict[str, Concept] = {
    concept.lesson: concept
    for part in (messages, models, strategies, systems)
    for concept in part.CONCEPTS
}


def concept_check(lesson: str) -> ConceptCheck:
    """Show the picture of a run that was not seen before, and ask five questions about it.

    Args:
        lesson: the name of a notebook, such as ``"01_messages"``.

    Raises:
        DistkitError: there is no such check.

    >>> check = concept_check("01_messages")
    >>> check.answer(1, "nobody").words
    'not what you expected'
    >>> check.score
    '1 of 5 questions answered, 0 right'
    """
    if lesson not in CONCEPTS:
        raise DistkitError(f"There is no concept check {lesson!r}. There are: {[*CONCEPTS]}.")
    return ConceptCheck(CONCEPTS[lesson])
