"""Optimizers on the servers: formulas, options, schedulers, states."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distkit import kvstore
from distkit.kvstore import KVStore
from distkit.kvstore.protocol import lr_scheduler as sched
from distkit.kvstore.testing import InProcess
from tests.stress.kvstore.cases.catalogue import case, near, ones, refused, same, store

Array = Any
#: Of a weight, a gradient, what is kept, and the how manieth update it is: the next weight.
Formula = Callable[[Array, Array, dict[str, Any], int], Array]

LR, WD = 0.1, 0.02


def _sgd(momentum: float) -> Formula:
    def formula(w: Array, g: Array, kept: dict[str, Any], t: int) -> Array:
        kept["m"] = momentum * kept.get("m", 0) - LR * (g + WD * w)
        return w + kept["m"]

    return formula


def _nag(w: Array, g: Array, kept: dict[str, Any], t: int) -> Array:
    step = LR * (g + WD * w)
    m = 0.9 * kept.get("m", 0)
    kept["m"] = m - step
    return w - m + 1.9 * (m - step)


def _signum(w: Array, g: Array, kept: dict[str, Any], t: int) -> Array:
    kept["m"] = 0.9 * kept.get("m", 0) - 0.1 * (g + WD * w)
    return (1 - LR * 0.01) * w + LR * np.sign(kept["m"])


def _signsgd(w: Array, g: Array, kept: dict[str, Any], t: int) -> Array:
    return (1 - LR * WD) * w - LR * np.sign(g)


def _moments(g: Array, kept: dict[str, Any]) -> tuple[Array, Array]:
    kept["m"] = 0.9 * kept.get("m", 0) + 0.1 * g
    kept["v"] = 0.999 * kept.get("v", 0) + 0.001 * g * g
    return kept["m"], kept["v"]


def _adam(w: Array, g: Array, kept: dict[str, Any], t: int) -> Array:
    m, v = _moments(g + WD * w, kept)
    return w - LR * math.sqrt(1 - 0.999**t) / (1 - 0.9**t) * m / (np.sqrt(v) + 1e-8)


def _adamw(w: Array, g: Array, kept: dict[str, Any], t: int) -> Array:
    m, v = _moments(g, kept)
    lr = LR * math.sqrt(1 - 0.999**t) / (1 - 0.9**t)
    w = w - lr * m / (np.sqrt(v) + 1e-6)
    return w - lr * WD * w


def _adamax(w: Array, g: Array, kept: dict[str, Any], t: int) -> Array:
    g = g + WD * w
    kept["m"] = 0.9 * kept.get("m", 0) + 0.1 * g
    kept["u"] = np.maximum(0.999 * kept.get("u", 0), abs(g))
    return w - LR / (1 - 0.9**t) * kept["m"] / kept["u"]


def _nadam(w: Array, g: Array, kept: dict[str, Any], t: int) -> Array:
    g = g + WD * w
    now, after = (0.9 * (1 - 0.5 * 0.96 ** (n * 0.004)) for n in (t, t + 1))
    kept["s"] = kept.get("s", 1) * now
    m, v = _moments(g, kept)
    bar = (1 - now) * g / (1 - kept["s"]) + after * m / (1 - kept["s"] * after)
    return w - LR * bar / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)


def _adagrad(w: Array, g: Array, kept: dict[str, Any], t: int) -> Array:
    kept["h"] = kept.get("h", 0) + g * g
    return w - LR * (g / np.sqrt(kept["h"] + 1e-7) + WD * w)


def _rmsprop(w: Array, g: Array, kept: dict[str, Any], t: int) -> Array:
    g = g + WD * w
    kept["n"] = 0.9 * kept.get("n", 0) + 0.1 * g * g
    return w - LR * g / np.sqrt(kept["n"] + 1e-8)


def _rmsprop_centered(w: Array, g: Array, kept: dict[str, Any], t: int) -> Array:
    g = g + WD * w
    kept["n"] = 0.9 * kept.get("n", 0) + 0.1 * g * g
    kept["g"] = 0.9 * kept.get("g", 0) + 0.1 * g
    root = np.sqrt(kept["n"] - kept["g"] ** 2 + 1e-8)
    kept["d"] = 0.9 * kept.get("d", 0) - LR * g / root
    return w + kept["d"]


def _adadelta(w: Array, g: Array, kept: dict[str, Any], t: int) -> Array:
    kept["g"] = 0.9 * kept.get("g", 0) + 0.1 * g * g
    delta = np.sqrt(kept.get("d", 0) + 1e-5) / np.sqrt(kept["g"] + 1e-5) * g
    kept["d"] = 0.9 * kept.get("d", 0) + 0.1 * delta * delta
    return w - (delta + WD * w)


def _ftrl(w: Array, g: Array, kept: dict[str, Any], t: int) -> Array:
    n = kept.get("n", 0)
    kept["z"] = kept.get("z", 0) + g - (np.sqrt(n + g * g) - np.sqrt(n)) * w / LR
    kept["n"] = n + g * g
    z = kept["z"]
    step = (np.sign(z) * 0.01 - z) / ((1 + np.sqrt(kept["n"])) / LR + WD)
    return step * (abs(z) > 0.01)


#: MXNet's: name, options beside learning rate and weight decay, formula.
FORMULAS: dict[str, tuple[str, dict[str, Any], Formula]] = {
    "sgd": ("sgd", {}, _sgd(0)),
    "sgd with momentum": ("sgd", {"momentum": 0.9}, _sgd(0.9)),
    "nag": ("nag", {"momentum": 0.9}, _nag),
    "signum": ("signum", {"wd_lh": 0.01}, _signum),
    "signsgd": ("signum", {"momentum": 0.0}, _signsgd),
    "adam": ("adam", {}, _adam),
    "adamw": ("adamw", {}, _adamw),
    "adamax": ("adamax", {}, _adamax),
    "nadam": ("nadam", {}, _nadam),
    "adagrad": ("adagrad", {}, _adagrad),
    "rmsprop": ("rmsprop", {}, _rmsprop),
    "rmsprop centered": ("rmsprop", {"centered": True}, _rmsprop_centered),
    "adadelta": ("adadelta", {"learning_rate": 1.0}, _adadelta),
    "ftrl": ("ftrl", {}, _ftrl),
}

TORCH: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "Adagrad": {"lr_decay": 0.1},
    "RMSprop": {"centered": True, "momentum": 0.5},
    "Adadelta": {},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "ASGD": {},
    "Rprop": {},
    "Adafactor": {},
    "Muon": {},
}


def gradients(steps: int, shape: tuple[int, ...]) -> list[torch.Tensor]:
    """The same in every call."""
    made = np.random.default_rng(5).standard_normal((steps, *shape))
    return [torch.from_numpy(g) for g in made]


@case(*FORMULAS)
def mxnets_formula(which: str) -> None:
    name, options, formula = FORMULAS[which]
    kv, w = store("dist_sync", 2, 3), np.linspace(-1, 1, 12)
    kv.set_optimizer(name, **{"learning_rate": LR, "wd": WD} | options)
    kv.init("w", torch.from_numpy(w.copy()))
    kept: dict[str, Any] = {}
    for t, g in enumerate(gradients(5, (12,)), 1):
        w = formula(w, g.numpy(), kept, t)
        kv.push("w", g)
    near(kv.pull("w"), w)


@case(*TORCH)
def torchs_optimizers_do_what_they_do(name: str) -> None:
    value = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)
    weight = torch.nn.Parameter(value.clone())
    theirs = getattr(torch.optim, name)([weight], lr=LR, **TORCH[name])
    kv = store("dist_sync", 2, 100 if name in ("Adafactor", "Muon") else 3)
    kv.set_optimizer(getattr(torch.optim, name), lr=LR, **TORCH[name])
    kv.init("w", value)
    for g in gradients(5, (3, 4)):
        weight.grad = g
        theirs.step()
        kv.push("w", g)
    near(kv.pull("w"), weight.detach())


@case("class", "instance", "name", "rule")
def an_optimizer_in_every_form(form: str) -> None:
    given: dict[str, tuple[Any, dict[str, Any]]] = {
        "class": (torch.optim.SGD, {"lr": 0.5}),
        "instance": (torch.optim.SGD([torch.ones(1)], lr=0.5), {}),
        "name": ("SGD", {"learning_rate": 0.5}),
        "rule": (kvstore.SGD(learning_rate=0.5), {}),
    }
    kv = store("local")
    optimizer, options = given[form]
    kv.set_optimizer(optimizer, **options)
    kv.init("w", ones())
    kv.push("w", ones())
    same(kv.pull("w"), 0.5)


@case("sgd", "adam", "torch.optim.Adam", "torch.optim.SGD")
def rescale_and_clip_come_before_the_rule(name: str) -> None:
    found = []
    for scale in (1.0, 4.0):
        kv = store("local")
        kv.set_optimizer(name, rescale_grad=1 / scale, clip_gradient=1.0)
        kv.init("w", ones())
        for g in (0.5, 3.0, -2.0):
            kv.push("w", ones(g * scale))
        found.append(kv.pull("w"))
    same(found[0], found[1])
    kv = store("local")
    kv.set_optimizer(name)
    kv.init("w", ones())
    for g in (0.5, 1.0, -1.0):
        kv.push("w", ones(g))
    same(kv.pull("w"), found[0])


@case("sgd", "torch.optim.SGD", "nag")
def lr_mult_and_wd_mult_hold_for_their_keys(name: str) -> None:
    kv = store("dist_sync", 2)
    kv.set_optimizer(name, learning_rate=0.5, wd=0.5, lr_mult={"a": 2.0}, wd_mult={"b": 0.0, 3: 2})
    kv.init(["a", "b", 3], [ones()] * 3)
    kv.push(["a", "b", 3], [ones()] * 3)
    for found, expected in zip(kv.pull(["a", "b", 3]) or (), (1 - 1.5, 0.5, 0.0), strict=True):
        near(found, expected * torch.ones(4, 4))


SCHEDULES: dict[str, tuple[Any, list[float]]] = {
    "factor": (sched.FactorScheduler(2, 0.5, base_lr=1.0), [1, 1, 0.5, 0.5, 0.25]),
    "factor stops": (sched.FactorScheduler(1, 0.1, 0.05, base_lr=1.0), [1, 0.1, 0.05, 0.05, 0.05]),
    "multi-factor": (
        sched.MultiFactorScheduler([1, 3], 0.5, base_lr=1.0),
        [1, 0.5, 0.5, 0.25, 0.25],
    ),
    "poly": (sched.PolyScheduler(4, base_lr=1.0, pwr=2), [9 / 16, 1 / 4, 1 / 16, 0, 0]),
    "cosine": (sched.CosineScheduler(2, base_lr=1.0, final_lr=0.5), [0.75, 0.5, 0.5, 0.5, 0.5]),
    "warm-up": (sched.FactorScheduler(10, base_lr=1.0, warmup_steps=4), [0.25, 0.5, 0.75, 1, 1]),
    "constant warm-up": (
        sched.FactorScheduler(
            10, base_lr=1.0, warmup_steps=3, warmup_begin_lr=0.5, warmup_mode="constant"
        ),
        [0.5, 0.5, 1, 1, 1],
    ),
}


@case(*SCHEDULES)
def schedulers_count_updates(which: str) -> None:
    scheduler, rates = SCHEDULES[which]
    kv, w = store("dist_sync", 2, 3), 0.0
    kv.set_optimizer("sgd", lr_scheduler=scheduler)
    kv.init("w", torch.zeros(4))
    for rate in rates:
        kv.push("w", torch.ones(4))
        w -= rate
        near(kv.pull("w"), torch.full((4,), w))


@case("sgd", "torch.optim.SGD")
def a_learning_rate_is_the_schedulers_base(name: str) -> None:
    kv = store("local")
    kv.set_optimizer(name, learning_rate=2.0, lr_scheduler=sched.FactorScheduler(1, 0.5))
    kv.init("w", torch.zeros(2))
    for expected in (-2.0, -3.0, -3.5):
        kv.push("w", torch.ones(2))
        same(kv.pull("w"), expected)


@case()
def the_schedule_is_that_of_the_most_updated_key() -> None:
    kv = store("local")
    kv.set_optimizer("sgd", lr_scheduler=sched.FactorScheduler(2, 0.5, base_lr=1.0))
    kv.init([1, 2], [torch.zeros(2)] * 2)
    for _ in range(3):
        kv.push(1, torch.ones(2))
    kv.push(2, torch.ones(2))
    same(kv.pull(2), -0.5)


@case("lambda", "torch")
def schedulers_that_do_not_travel_are_refused(which: str) -> None:
    given: Any = (
        (lambda n: 1.0)
        if which == "lambda"
        else torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)]), 3)
    )
    refused(lambda: store("local").set_optimizer("sgd", lr_scheduler=given), "FactorScheduler")


@case("sgdd", "lbsgd", "torch.optim.LBFGS", "torch.optim.Nothing", "os.system")
def unknown_names_are_told_those_there_are(name: str) -> None:
    refused(lambda: store("local").set_optimizer(name), "Adam")


@case(("sgd", "lr"), ("adam", "momentum"), ("torch.optim.Adam", "momentum"), ("ftrl", "alpha"))
def unknown_options_are_told_those_there_are(name: str, option: str) -> None:
    options: Any = {option: 1.0}
    refused(lambda: store("local").set_optimizer(name, **options), f"'{option}'", "It takes")


@case("SGD", "Adam")
def rules_tell_their_options(name: str) -> None:
    kind = getattr(kvstore.optimizer, name)
    refused(lambda: kind(lr=0.1), "'lr'", "learning_rate", "wd", "rescale_grad")


@case("adam", "torch.optim.Adam", "torch.optim.SGD")
def a_schedulers_base_counts_if_no_rate_is_given(name: str) -> None:
    found = []
    schedule = sched.FactorScheduler(9, base_lr=0.25)
    for options in ({"learning_rate": 0.25}, {"lr_scheduler": schedule}):
        kv = store("local")
        kv.set_optimizer(name, **options)
        kv.init("w", ones())
        kv.push("w", ones())
        found.append(kv.pull("w"))
    same(found[0], found[1])


@case("adam", "adamw", "nadam", "adamax")
def factors_that_never_forget_are_refused(name: str) -> None:
    refused(lambda: store("local").set_optimizer(name, beta1=1.0), "beta1=1.0", "below 1")


@case("negative", "words", "function")
def values_that_are_none_are_refused(which: str) -> None:
    kv = store("local")
    if which == "negative":
        refused(lambda: kv.set_optimizer(torch.optim.Adam, lr=-1.0), "learning rate")
    elif which == "words":
        refused(lambda: kv.set_optimizer("sgd", learning_rate="much"), "learning_rate")
    else:
        refused(lambda: kv.set_optimizer(print), "Code cannot be sent")


@case()
def an_optimizer_that_has_made_steps_is_refused() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.Adam([weight])
    weight.grad = torch.ones(1)
    optimizer.step()
    refused(lambda: store("local").set_optimizer(optimizer), "made steps")


@case("Adafactor", "Muon")
def what_needs_whole_arrays_says_so(name: str) -> None:
    kv = store("dist_sync", 2, 3)
    kv.set_optimizer(getattr(torch.optim, name))
    kv.init("w", ones())
    kv.push("w", ones())
    refused(lambda: kv.pull("w"), "bigarray_bound")


@case()
def muon_is_for_matrices() -> None:
    kv = store("local")
    kv.set_optimizer(torch.optim.Muon)
    kv.init("b", torch.ones(4))
    kv.push("b", torch.ones(4))
    refused(lambda: kv.pull("b"), "matrices")


@case("sgd", "torch.optim.Adam")
def another_optimizer_is_refused(name: str) -> None:
    kv = store("dist_sync")
    kv.set_optimizer(name)
    kv.set_optimizer(name)
    refused(lambda: kv.set_optimizer("adagrad"), "once per run")
    kv.set_optimizer("adagrad", anew=True)


@case(*((name, multi) for name in ("sgd", "adam", "torch.optim.Adam", "nag") for multi in (0, 1)))
def sixteen_bits(name: str, multi: int) -> None:
    kv = store("dist_sync", 2, 3)
    kv.set_optimizer(name, learning_rate=1e-4, multi_precision=bool(multi))
    kv.init("w", ones(dtype=torch.bfloat16))
    for _ in range(20):
        kv.push("w", ones(dtype=torch.bfloat16))
    found: Any = kv.pull("w")
    assert found.dtype is torch.bfloat16
    same(found, torch.tensor(1 - 20e-4).bfloat16().expand(4, 4) if multi else 1)


STATES = (
    "sgd with momentum",
    "nag",
    "adam",
    "nadam",
    "rmsprop centered",
    "adagrad",
    "adadelta",
    "ftrl",
    "signum",
)


def _resumed(set_up: Callable[[KVStore], None], dump: bool, servers: int) -> None:
    """Half of the training, saved and gone on with elsewhere, is the whole."""
    grads = gradients(6, (3, 4))
    whole, first = store("dist_sync", servers, 3), store("dist_sync", servers, 3)
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "states"))
        for kv in (whole, first):
            set_up(kv)
            kv.init("w", torch.ones(3, 4, dtype=torch.float64))
        for g in grads[:3]:
            whole.push("w", g)
            first.push("w", g)
        first.save_optimizer_states(file, dump_optimizer=dump)
        second = store("dist_sync", servers, 3)
        if not dump:
            set_up(second)
        half: Any = first.pull("w")
        second.init("w", half)
        second.load_optimizer_states(file)
    for g in grads[3:]:
        whole.push("w", g)
        second.push("w", g)
    same(second.pull("w"), whole.pull("w"))


@case(*STATES)
def states_go_on_where_they_were(which: str) -> None:
    name, options, _ = FORMULAS[which]
    _resumed(lambda kv: kv.set_optimizer(name, **options), dump=False, servers=2)


@case("SGD", "Adam", "NAdam", "Rprop", "ASGD")
def torchs_states_go_on_where_they_were(name: str) -> None:
    kind = getattr(torch.optim, name)
    _resumed(lambda kv: kv.set_optimizer(kind, lr=LR, **TORCH[name]), dump=True, servers=2)


@case("adam", "torch.optim.Adam")
def a_dumped_optimizer_comes_with_its_options(name: str) -> None:
    schedule = sched.PolyScheduler(10, base_lr=0.5)
    _resumed(
        lambda kv: kv.set_optimizer(name, lr_scheduler=schedule, lr_mult={"w": 2.0}),
        dump=True,
        servers=1,
    )


@case("local", "dist_sync")
def states_before_the_first_step(kind: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "states"))
        kv = store(kind)
        kv.set_optimizer("adam", learning_rate=0.5)
        kv.init("w", ones())
        kv.save_optimizer_states(file, dump_optimizer=True)
        other = store(kind)
        other.init("w", ones())
        other.load_optimizer_states(file)
        other.push("w", ones())
        near(other.pull("w"), ones(0.5))


@case()
def states_may_be_loaded_before_init() -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "states"))
        kv = store("local")
        kv.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
        kv.init("w", ones(0))
        kv.push("w", ones())
        kv.save_optimizer_states(file)
        other = store("local")
        other.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
        other.load_optimizer_states(file)
        other.init("w", ones(0))
        other.push("w", ones())
        same(other.pull("w"), -1.5)


@case("adam", "torch.optim.Adam")
def states_of_scalars_and_of_nothing(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file, kv = str(Path(folder, "states")), store("local")
        kv.set_optimizer(name)
        kv.init(["s", "none", "n"], [torch.tensor(1.0), torch.zeros(0, 3), torch.tensor(3)])
        kv.push(["s", "none"], [torch.tensor(1.0), torch.zeros(0, 3)])
        kv.save_optimizer_states(file)
        before = kv.pull("s")
        kv.load_optimizer_states(file)
        same(kv.pull("s"), before)


@case("save", "load")
def states_need_an_optimizer(which: str) -> None:
    kv = store("local")
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "states"))
        if which == "save":
            refused(lambda: kv.save_optimizer_states(file), "set_optimizer")
            return
        other = store("local")
        other.set_optimizer("sgd")
        other.save_optimizer_states(file)
        refused(lambda: kv.load_optimizer_states(file), "set_optimizer")


@case()
def states_of_another_optimizer_are_refused() -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "states"))
        kv, other = store("local"), store("local")
        kv.set_optimizer("sgd", momentum=0.9)
        other.set_optimizer("adam")
        for one in (kv, other):
            one.init("w", ones())
        kv.push("w", ones())
        kv.save_optimizer_states(file)
        refused(lambda: other.load_optimizer_states(file), "momentum of 'w'")


@case("sgd", "adam")
def all_workers_set_the_same(name: str) -> None:
    def work(kv: KVStore) -> Any:
        kv.set_optimizer(name, learning_rate=0.5, rescale_grad=1 / kv.num_workers)
        kv.init("w", ones())
        kv.push("w", ones())
        return kv.pull("w")

    for found in InProcess(3, 2, bound=5).run(work):
        near(found, ones(0.5))
