"""Two hundred random correct programs raise no false alarm."""

from __future__ import annotations

from random import Random

import pytest

from tests.stress.random_programs import false_alarm, program


@pytest.mark.parametrize("seed", range(200))
def test_correct_program_has_no_findings(seed: int) -> None:
    assert false_alarm(program(Random(seed))) == ""
