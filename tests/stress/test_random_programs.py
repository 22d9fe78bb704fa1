"""Two hundred random correct programs, none of which is reported."""

from __future__ import annotations

from random import Random

import pytest

from tests.stress.random_programs import false_alarm, program


@pytest.mark.parametrize("seed", range(200))
def test_correct_program_raises_no_alarm(seed: int) -> None:
    assert false_alarm(program(Random(seed))) == ""
