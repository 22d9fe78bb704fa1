"""Two hundred random correct programs: nothing is reported about any."""

from __future__ import annotations

from random import Random

import pytest

from tests.stress.random_programs import alarm, program


@pytest.mark.parametrize("seed", range(200))
def test_correct_program_raises_no_alarm(seed: int) -> None:
    assert alarm(program(Random(seed))) == ""
