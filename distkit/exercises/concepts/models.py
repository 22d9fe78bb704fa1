"""The concept checks of the lessons 04 to 08: servers, hangs, costs."""

from __future__ import annotations

from distkit.exercises.concepts.concept import Concept

CONCEPTS: tuple[Concept, ...] = ()
