"""The concept checks of the lessons 09 to 15: whole systems."""

from __future__ import annotations

from distkit.exercises.concepts.concept import Concept

CONCEPTS: tuple[Concept, ...] = ()
