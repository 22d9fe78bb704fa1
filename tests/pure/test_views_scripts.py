"""The painters' modules, joined into one script per view."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from distkit.views.widget.assets import _MODULES, esm

_DECLARED = re.compile(r"^(?:const|let|class|(?:async )?function\*?) +([\w$]+)", re.MULTILINE)


@pytest.mark.parametrize("view", _MODULES)
def test_no_two_modules_declare_the_same_name(view: str) -> None:
    names = Counter(_DECLARED.findall(esm(view)))
    assert len(names) > 10
    assert [name for name, n in names.items() if n > 1] == []
