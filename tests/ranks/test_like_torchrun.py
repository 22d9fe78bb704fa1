"""A program runs in the same environment on a rank as under torchrun."""

from __future__ import annotations

import ast
import multiprocessing
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import distkit as dk

# -- random numbers --------------------------------------------------------------


def draw_numbers() -> tuple[float, float, float]:
    return torch.rand(1).item(), np.random.rand(), random.random()


def test_ranks_draw_different_numbers() -> None:
    numbers = dk.run_ranks(draw_numbers, 3).results + dk.run_ranks(draw_numbers, 2).results
    assert all(len({*values}) == 5 for values in zip(*numbers, strict=True))


def test_run_can_be_repeated() -> None:
    first = dk.run_ranks(draw_numbers, 2, seed=7)
    assert first.trace.info.seed == 7
    assert dk.run_ranks(draw_numbers, 2, seed=7).results == first.results
    assert dk.run_ranks(draw_numbers, 3, seed=7).results[:2] == first.results
    assert first.results[0] != first.results[1]
    unseeded = dk.run_ranks(draw_numbers, 2)
    assert dk.run_ranks(draw_numbers, 2, seed=unseeded.trace.info.seed).results == unseeded.results


# -- the environment -------------------------------------------------------------

ENVIRONMENT = """
import os
print({k: v for k, v in os.environ.items()
       if k.startswith(("GROUP_", "LOCAL_", "MASTER_", "OMP_", "RANK", "ROLE_", "TORCH", "WORLD_"))
       and k != "TORCH_HOME"})
"""
#: Variables whose values depend on the launcher.
LAUNCHER_SPECIFIC = {
    "MASTER_PORT",
    "OMP_NUM_THREADS",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
}


def environments(printed: str) -> list[dict[str, str]]:
    found = [
        ast.literal_eval(literal)
        for literal in re.findall("{.*?}", printed)  # ranks may share a line
    ]
    return sorted(found, key=lambda environment: environment["RANK"])


def test_script_has_the_environment_of_torchrun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "env.py"
    script.write_text(ENVIRONMENT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(script)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    expected = environments(ran.stdout)
    assert len(expected) == 2, ran.stderr
    dk.run_ranks(script, 2)
    actual = environments(capsys.readouterr().out)
    for mine, reference in zip(actual, expected, strict=True):
        assert {*mine} == {*reference}
        assert {k: v for k, v in mine.items() if k not in LAUNCHER_SPECIFIC} == {
            k: v for k, v in reference.items() if k not in LAUNCHER_SPECIFIC
        }
    assert dist.is_available()


def test_ranks_can_rendezvous_at_the_master_port() -> None:
    def program() -> int:
        dist.destroy_process_group()
        rank, world_size = dist_environment("RANK"), dist_environment("WORLD_SIZE")
        port = dist_environment("MASTER_PORT")
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
        x = torch.ones(1)
        dist.all_reduce(x)
        return int(x)

    assert dk.run_ranks(program, 2).results == [2, 2]


def dist_environment(name: str) -> int:
    return int(os.environ[name])


# -- output ----------------------------------------------------------------------


def test_standard_output_behaves_like_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    def program() -> str:
        sys.stdout.buffer.write("bytes: \u00e9\n".encode())
        print("a broken name: \udcff")
        print("no newline, flushed", end="", flush=True)
        print()
        print("\rstep 1\rstep 2\rstep 3", file=sys.stderr)
        os.write(sys.stdout.fileno(), b"by descriptor\n")
        subprocess.run([sys.executable, "-c", "print('another program')"], check=True)
        if os.fork() == 0:
            print("a child")
            sys.stdout.flush()
            os._exit(0)
        os.wait()
        return sys.stdout.encoding

    run = dk.run_ranks(program, 1)
    out, err = capsys.readouterr()
    lines = [
        "bytes: é",
        "a broken name: \\udcff",
        "no newline, flushed",
        "by descriptor",
        "another program",
        "a child",
    ]
    assert sorted(out.splitlines()) == sorted(f"[rank 0] {line}" for line in lines)
    assert err == "[rank 0] step 3\n"
    assert all(line in run.output[0] for line in lines)
    assert run.results == ["utf-8"]


def test_many_lines_are_printed_within_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    def program(lines: int) -> None:
        for number in range(lines):
            print(number)

    began = time.monotonic()
    run = dk.run_ranks(program, 2, 100_000)
    assert time.monotonic() - began < 30
    assert capsys.readouterr().out.count("\n") == 200_000
    assert run.output[1].splitlines()[-1] == "99999"


def test_input_raises_with_a_remedy() -> None:
    with pytest.raises(
        dk.errors.RankError, match=r"EOFError: input\(\) is not available on a rank\. .* argument"
    ):
        dk.run_ranks(lambda: input("name? "), 2)


# -- child processes -------------------------------------------------------------


def double(x: int) -> int:
    return 2 * x


def pool() -> list[int]:
    with multiprocessing.get_context("fork").Pool(2) as workers:
        return workers.map(double, range(4))


def test_rank_can_use_a_process_pool() -> None:
    assert dk.run_ranks(pool, 2).results == [[0, 2, 4, 6]] * 2
