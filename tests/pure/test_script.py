"""Exported scripts: what of a notebook and of distkit they have, and what cannot be exported."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from distkit.cli import main
from distkit.errors import DistkitError
from distkit_experiments.script import export

LESSON = '''
import torch
import torch.distributed as dist
import distkit as dk
from math import sqrt as root

print("nothing of this is needed")
RATE = 0.1  # η
WIDE, HIGH = 3, 4

def helper(x):
    return root(x) * RATE

@torch.no_grad()
def unused():
    return dk.Cluster(2)

def train(steps: int = 2):
    """Größe: a name with more than one byte."""
    images, labels = dk.shard(*dk.demos.digits())  # ü and a comment
    with dk.mark("größe"): dk.sync_initial_weights(dk.demos.model())
    return [helper(WIDE) for _ in dk.progress(range(steps))]
'''


def exported(tmp_path: Path, text: str, name: str = "train") -> str:
    file = tmp_path / "lesson.py"
    file.write_text(text, "utf-8")
    return export(file, name)


def defined(script: str) -> list[str]:
    tree = ast.parse(script)
    return [n.name for n in tree.body if isinstance(n, ast.FunctionDef)]


def test_a_script_has_what_the_function_refers_to(tmp_path: Path) -> None:
    script = exported(tmp_path, LESSON)
    assert "from math import sqrt as root" in script and "nothing of this" not in script
    assert "RATE = 0.1  # η" in script
    names = defined(script)
    assert {"train", "helper", "shard", "digits", "model", "mark", "progress"} <= {*names}
    assert "unused" not in names and "Cluster" not in script
    assert "images, labels = shard(*digits())  # ü and a comment" in script
    assert 'with mark("größe"): sync_initial_weights(model())' in script
    assert not {
        n
        for n in ast.walk(ast.parse(script))
        if isinstance(n, ast.Import | ast.ImportFrom) and any("distkit" in a.name for a in n.names)
    }


def test_each_thing_is_defined_before_it_is_used_and_once(tmp_path: Path) -> None:
    text = LESSON + "\n@decorated\ndef other():\n    return train()\n"
    text = text.replace("def helper", "def decorated(f):\n    return f\n\ndef helper")
    names = defined(exported(tmp_path, text, "other"))
    assert names.index("decorated") < names.index("other")
    assert len(names) == len({*names})


STATEMENTS = """
import os
import distkit as dk
x = [1]
table = {}
class Old: pass
def twice(n): return missing
if x:
    word = "yes"
else:
    word = "no"
a = len(x)
y = a
a = 5
x = x + [2]
table["a"] = 1
for i in range(3):
    table[i] = y
try:
    import absent
except ImportError:
    absent = None
with open(os.devnull) as file:
    pass
class Options:
    size: int = 3
    area = size * size
def twice(n): return 2 * n
unused = dk.Cluster
def train(z=[k for k in range(2)]):
    return x, table, word, a, twice(Options.area), absent, file.closed, [k for k in z], __name__
"""


def test_all_statements_that_make_a_value_are_there_in_their_order(tmp_path: Path) -> None:
    script = exported(tmp_path, STATEMENTS)
    space: dict[str, Any] = {"__name__": "script"}
    exec(compile(script, "script.py", "exec"), space)
    table = {"a": 1, 0: 1, 1: 1, 2: 1}
    assert space["train"]() == ([1, 2], table, "yes", 5, 18, None, True, [0, 1], "script")
    assert "Old" not in script and "missing" not in script and "unused" not in script


CALLS = """
import random
import torch
import torch.nn as nn
random.seed(7)
torch.manual_seed(3)
torch.ones(lost)
net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
shown = []
shown.append(net)
batches = []
batches.append(random.random())
for n in range(2):
    if n:
        batches.append(n)
for layer in net:
    layer.requires_grad_(False)
nn.init.ones_(net[0].weight)
net.to(torch.float64).eval()
def train():
    return batches, net
batches.extend([5])
if __name__ == "__main__":
    batches.append(train(missing))
"""


def test_calls_that_change_what_a_function_uses_come_along(tmp_path: Path) -> None:
    import random

    import torch

    before = random.getstate()
    with torch.random.fork_rng():
        space: dict[str, Any] = {"__name__": "script"}
        script = exported(tmp_path, CALLS)
        exec(compile(script, "script.py", "exec"), space)
        batches, net = space["train"]()
        torch.manual_seed(3)
        same = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    random.setstate(before)
    assert batches == [random.Random(7).random(), 1, 5]
    assert torch.equal(net[0].weight, torch.ones(2, 2, dtype=torch.float64)) and not net.training
    assert torch.equal(net[1].weight, same[1].weight.double())
    assert not any(p.requires_grad for p in net.parameters())
    assert not {word for word in ("shown", "lost", "missing") if word in script}


def test_a_script_takes_a_backend_for_each_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    import torch.distributed as dist

    done: list[Any] = []
    for name in ("is_available", "device_count"):
        monkeypatch.setattr(torch.cuda, name, lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", done.append)
    monkeypatch.setattr(dist, "init_process_group", done.append)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: done.append("over"))
    monkeypatch.setattr("sys.argv", ["script.py"])
    monkeypatch.setenv("LOCAL_RANK", "3")
    script = exported(tmp_path, "def train(): pass")
    exec(compile(script, "script.py", "exec"), {"__name__": "__main__"})
    assert done == [1, "cpu:gloo,cuda:nccl", "over"]


def test_a_notebooks_magics_are_left_out(tmp_path: Path) -> None:
    cells = [
        "%matplotlib inline\n!ls\nimport distkit as dk",
        "%%ranks\nnot python",
        "def f():\n    return dk.shard",
    ]
    notebook = {"cells": [{"cell_type": "code", "source": [c]} for c in cells]}
    file = tmp_path / "n.ipynb"
    file.write_text(json.dumps(notebook))
    assert {"f", "shard"} <= {*defined(export(file, "f"))}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1", "no function 'train' at the top. It has none"),
        ("def other(): ...", "It has other"),
        ("def train(:", "line 1: "),
        ("import distkit as dk\ndef train(): return dk.Cluster(2)", "needs distkit.cluster.clust"),
        (
            "import distkit as dk\ndef train():\n    kv = dk.kvstore.create('dist_sync')",
            "which is no plain torch",
        ),
        (
            "import distkit as dk\ndef shard(): ...\ndef train(): return shard(), dk.shard(1)",
            "shard is defined in",
        ),
        ("import distkit as dk\ndef train(): return dk.watch_gradients", "Take it out"),
        ("def train(): return lost", "needs 'lost', which nothing at the top defines"),
        ("from math import *\ndef train(): return sqrt(2)", "needs 'sqrt', which nothing"),
        ("class A:\n    b = c\ndef train(): return A", "needs 'c', which nothing"),
        ("def train():\n    import distkit as dk", "line 2: a script has none of distkit's"),
        ("def train():\n    from distkit.errors import DistkitError", "line 2: a script has none"),
        ("import distkit.errors as e\ndef train(): return e", "line 1: a script has none"),
        ("from distkit import shard as s\ndef train(): return s", "line 1: a script has none"),
        ("import distkit as dk\ndef train(): return dk", "line 2: a script has none"),
        (
            "import distkit as dk\nt = []\nt.append(dk.Cluster(2))\ndef train(): return t",
            "line 3: t.append(dk.Cluster(2)) may change what the function uses",
        ),
        ("try:\n    import distkit as dk\nfinally: pass\ndef train(): return dk", "line 2: a s"),
    ],
)
def test_what_cannot_be_exported_is_said(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(DistkitError) as error:
        exported(tmp_path, text)
    assert said in str(error.value)


def test_the_command_line_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "lesson.py", tmp_path / "train.py"
    source.write_text(LESSON, "utf-8")
    assert main(["export", "script", str(source), "train", "--out", str(out)]) == 0
    assert f"torchrun --nproc-per-node=4 {out}" in capsys.readouterr().out
    assert out.read_text("utf-8") == export(source, "train")
    assert main(["export", "script", str(tmp_path / "none.py"), "train", "--out", str(out)]) == 1
    assert "none.py cannot be read (No such file or directory)" in capsys.readouterr().err
