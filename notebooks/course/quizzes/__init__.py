"""The concept check of each lesson; a file for each group of lessons."""

from __future__ import annotations

from distkit_course.content.quizzes import messages, models, strategies, systems
from distkit_course.quizzes import Concept

CONCEPTS: dict[str, Concept] = {
    concept.lesson: concept
    for part in (messages, models, strategies, systems)
    for concept in part.CONCEPTS
}
