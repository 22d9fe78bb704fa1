"""Layouts, memory formulas, and idle time in a trace."""

from __future__ import annotations

import re
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import distkit as dk
from distkit_parallel import LLAMA_3_8B, PIPELINES, Layout, States, Transformer, idle
from distkit_parallel.memory import GIB
from distkit_simulation import Link, Network, pipeline

# -- layouts -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"dp": 2, "tp": 3, "world": 8}, "dp · pp · tp = 6 ranks, but there are 8"),
        ({"tp": 3, "heads": 32}, "heads = 32 is not divisible by tp = 3"),
        ({"tp": 4, "kv_heads": 2}, "kv_heads = 2 is not divisible by tp = 4"),
        ({"tp": 2, "hidden": 4095}, "hidden = 4095 is not divisible by tp = 2"),
        ({"heads": 3, "hidden": 4096}, "hidden = 4096 is not divisible by heads = 3"),
        ({"tp": 8, "inner": 100}, "inner = 100 is not divisible by tp = 8"),
        ({"tp": 2, "vocabulary": 50257}, "vocabulary = 50257 is not divisible by tp = 2"),
        ({"tp": 2, "sequence": 1023}, "sequence = 1023 is not divisible by tp = 2"),
        ({"pp": 3, "layers": 32}, r"layers = 32 is not divisible by pp · chunks = 3 · 1"),
        ({"pp": 4, "layers": 12, "chunks": 2}, r"layers = 12 is not .* pp · chunks = 4 · 2"),
        (
            {"dp": 4, "batch": 36, "microbatches": 2},
            "batch = 36 is not divisible by dp · microbatches = 8",
        ),
        ({"tp": 16, "devices_per_host": 8}, "devices_per_host = 8 is not divisible by tp = 16"),
        (
            {"pp": 4, "microbatches": 9, "schedule": "interleaved", "chunks": 2},
            "9 micro-batches on 4 ranks would form 2 groups",
        ),
        ({"schedule": "zigzag"}, "unknown algorithm 'zigzag'; choose from gpipe"),
        ({"dp": 0}, "dp = 0 is not a positive integer"),
        ({"tp": 2.0}, "tp = 2.0 is not a positive integer"),
        ({"heads": True}, "heads = True is not a positive integer"),
    ],
)
def test_invalid_layout_raises_before_start(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(dk.errors.LayoutError, match=message):
        Layout(**sizes)


def test_layout_error_lists_all_violations_and_nearest_layouts() -> None:
    with pytest.raises(dk.errors.LayoutError) as caught:
        Layout(dp=1, tp=6, pp=4, world=24, heads=32, layers=32, batch=48)
    assert str(caught.value).splitlines() == [
        "Layout(dp=1, pp=4, tp=6) does not fit:",
        "  heads = 32 is not divisible by tp = 6",
        "The nearest valid layouts: Layout(dp=3, pp=4, tp=2), Layout(dp=3, pp=2, tp=4)",
    ]


sizes = st.fixed_dictionaries(
    {name: st.integers(1, 9) for name in ("dp", "tp", "pp", "microbatches")},
    optional={
        "world": st.sampled_from([4, 8, 12, 24]),
        "heads": st.sampled_from([6, 8, 32]),
        "layers": st.sampled_from([6, 24, 32]),
        "batch": st.sampled_from([24, 48, 96]),
    },
)


@given(sizes)
@settings(max_examples=150)
def test_suggested_layouts_are_valid(sizes: dict[str, int]) -> None:
    try:
        Layout(**sizes)
    except dk.errors.LayoutError as error:
        for dp, pp, tp in re.findall(r"Layout\(dp=(\d+), pp=(\d+), tp=(\d+)\)", str(error))[1:]:
            Layout(**sizes | {"dp": int(dp), "tp": int(tp), "pp": int(pp)})


def test_every_rank_has_a_unique_position() -> None:
    layout = Layout(dp=2, tp=2, pp=3, world=12)
    positions = [tuple(layout.coordinates(rank).values()) for rank in range(12)]
    assert positions == list(product(range(2), range(3), range(2)))
    with pytest.raises(dk.errors.LayoutError, match="rank 12 does not exist"):
        layout.coordinates(12)


# -- memory ----------------------------------------------------------------------------------


def test_state_sizes_of_llama_3_8b_match_the_formula() -> None:
    n = LLAMA_3_8B.parameters
    unsharded = States.of(n)
    parts = unsharded.parameters, unsharded.gradients, unsharded.optimizer
    assert [round(part / GIB, 3) for part in parts] == [14.957, 14.957, 59.828]
    sharded = [States.of(n, ranks=8, stage=stage) for stage in range(4)]
    assert [s.total for s in sharded] == [
        unsharded.total,
        unsharded.total - unsharded.optimizer * 7 / 8,
        unsharded.parameters + (unsharded.gradients + unsharded.optimizer) / 8,
        unsharded.total / 8,
    ]


#: Layers, hidden size, heads, and 5as/h at 2,048 tokens, from Korthikanti et al., 2022.
KORTHIKANTI = {
    "22B": (48, 6144, 64, 320 / 3),
    "175B": (96, 12288, 96, 80.0),
    "530B": (105, 20480, 128, 64.0),
    "1T": (128, 25600, 160, 64.0),
}


@pytest.mark.parametrize("name", KORTHIKANTI)
def test_activations_match_korthikanti_et_al(name: str) -> None:
    """Table 2 of the paper: bytes of a layer, as multiples of s·b·h."""
    layers, hidden, heads, scores = KORTHIKANTI[name]
    model = Transformer(layers, hidden, heads, heads, 4 * hidden, 51200)
    s, b, t = 2048, 4, 8

    def of(**kept) -> float:
        return model.activations(s, b, **kept) / (s * b * hidden * layers)

    table = {
        ("none", 1, False): 34 + scores,
        ("none", t, False): 10 + 24 / t + scores / t,
        ("none", t, True): (34 + scores) / t,
        ("selective", t, False): 10 + 24 / t,
        ("selective", t, True): 34 / t,
        ("full", t, False): 2,
    }
    for (recompute, tensor, sequence), expected in table.items():
        assert of(recompute=recompute, tensor=tensor, sequence_parallel=sequence) == pytest.approx(
            expected, rel=1e-12
        )
    saved = 1 - of(recompute="selective") / of(recompute="none")
    published = {"175B": 0.70, "530B": 0.65}  # section 5
    assert saved == pytest.approx(published.get(name, saved), abs=0.005)


def test_stage_activations_follow_the_recomputation_options() -> None:
    kept = {"tensor": 8, "recompute": "none", "sequence_parallel": True}
    stage = LLAMA_3_8B.stage_activations(4096, stages=8, microbatches=32, **kept)
    assert stage == LLAMA_3_8B.activations(4096, **kept)
    with pytest.raises(ValueError, match="recompute='all': use 'none', 'selective', 'full'"):
        LLAMA_3_8B.activations(4096, recompute="all")


def test_pipeline_reduces_parameters_but_not_activations() -> None:
    assert round(2 * LLAMA_3_8B.embedding / GIB, 4) == 0.9785
    assert round(2 * LLAMA_3_8B.largest_stage(8) / GIB, 4) == 2.6035
    assert LLAMA_3_8B.largest_stage(1) == LLAMA_3_8B.parameters
    full = LLAMA_3_8B.activations(4096)
    kept = {
        name: LLAMA_3_8B.stage_activations(4096, stages=8, microbatches=32, schedule=name)
        for name in ("gpipe", "1f1b", "zero_bubble")
    }
    assert kept == {"gpipe": 4 * full, "1f1b": full, "zero_bubble": full}
    looped = {"stages": 4, "microbatches": 8, "schedule": "zero_bubble", "chunks": 2}
    assert LLAMA_3_8B.stage_activations(4096, **looped) == full


# -- idle time -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 1), (4, 4), (4, 16)])
def test_simulated_bubble_equals_the_formula(name: str, p: int, m: int) -> None:
    trace = pipeline(p, m, 1.0, 2.0, 0, Network(Link(0, 0)), order=name)
    assert idle(trace) == pytest.approx(
        dict.fromkeys(range(p), PIPELINES[name].bubble_fraction(p, m))
    )


def test_idle_time_of_an_unmarked_run_raises() -> None:
    trace = pipeline(2, 2, 1.0, 2.0, 0, Network(Link(0, 0)))
    with pytest.raises(ValueError, match=r"rank 0 has no finished span 'step': put `with dk.mark"):
        idle(trace, "step")
