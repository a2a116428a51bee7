"""fp16 with a loss scale, and memory by ZeRO stage, in the complete program."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from megalite.optim.loss_scale import LossScale
from tests.end_to_end.runs import LLAMA, NO_DROPOUT, Run, losses, metrics, words

STEPS = 12
PLAIN = (*LLAMA, *NO_DROPOUT, *words(f"--optimizer sgd --sgd-momentum 0 --clip-grad 0 --train-iters {STEPS}"))


def train(run: Run, directory: Path, flags: str, world_size: int = 1) -> Path:
    run(*PLAIN, "--save", directory, *words(flags), world_size=world_size)
    return directory


@pytest.mark.wide
def test_the_loss_scale_leaves_no_trace(run: Run, tmp_path: Path) -> None:
    """Use plain SGD, whose updates change if a scale is left in gradients; 1 % is the tolerance for fp16's 11 bits."""
    exact = losses(train(run, tmp_path / "fp32", "--lr 0.1"))
    scaled = losses(train(run, tmp_path / "fp16", "--lr 0.1 --fp16 --loss-scale 1024"))
    assert not any("params_norm" in step for step in metrics(tmp_path / "fp16"))  # which is recorded on request
    assert scaled == pytest.approx(exact, rel=0.01)
    assert exact[0] - exact[-1] > 10 * max(abs(a - b) for a, b in zip(scaled, exact, strict=True))


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("", marks=pytest.mark.wide),
        pytest.param("--tp 2 --sequence-parallel", marks=pytest.mark.wide),
        "--data-parallel-sharding-strategy optim_grads",
    ],
)
def test_a_dynamic_scale_finds_its_place_and_is_kept(layout: str, run: Run, tmp_path: Path) -> None:
    """It starts too high, overflows, decreases by its rule, and continues from its value when the run is resumed."""
    flags = f"--fp16 --initial-loss-scale {2.0**24} --hysteresis 2 --loss-scale-window 3 {layout}"
    world_size = 2 if layout else 1
    whole = metrics(train(run, tmp_path / "whole", flags, world_size))
    broken = tmp_path / "broken"
    run(*PLAIN, "--save", broken, *words(flags), "--exit-interval", 5, world_size=world_size, expected=85)
    assert metrics(train(run, broken, f"{flags} --resume auto", world_size)) == whole
    scale = LossScale.dynamic(2.0**24, 1.0, 3, 2)
    for step in whole:
        assert step["loss_scale"] == scale.value
        scale = scale.after(overflow=step["skipped"])
    skipped = [step["skipped"] for step in whole]
    assert skipped[0]
    assert not all(skipped)


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("no_shard", marks=pytest.mark.wide),
        pytest.param("optim", marks=pytest.mark.wide),
        pytest.param("optim_grads", marks=pytest.mark.wide),
        pytest.param("optim_grads_params", marks=pytest.mark.wide),  # as tests/distributed/test_layouts_steps.py
    ],
)
def test_every_strategy_trains_the_same_model(strategy: str, run: Run, tmp_path: Path) -> None:
    flags = f"--fp64 --data-parallel-sharding-strategy {strategy} --global-batch-size 8"
    alone = losses(train(run, tmp_path / "alone", "--fp64 --global-batch-size 8"))
    assert losses(train(run, tmp_path / "two", flags, world_size=2)) == pytest.approx(alone, rel=1e-10)
    if strategy != "no_shard":
        instances = f"{flags} --num-distributed-optimizer-instances 2"
        assert losses(train(run, tmp_path / "four", instances, world_size=4)) == pytest.approx(alone, rel=1e-10)


@pytest.mark.wide
def test_norms_and_zeros_are_recorded_on_request(run: Run, tmp_path: Path) -> None:
    """The values are the same on any layout."""
    flags = "--fp64 --global-batch-size 8 --log-params-norm --log-num-zeros-in-grad --lr 0.1"
    alone = metrics(train(run, tmp_path / "alone", flags))
    split = metrics(train(run, tmp_path / "split", f"{flags} --data-parallel-sharding-strategy optim_grads", 2))
    groups = ("weights", "vectors", "token_tables")
    for one, two in zip(alone, split, strict=True):
        for kind in ("params_norm", "grad_norm"):
            parts = [one[f"{kind}/{group}"] for group in groups]
            assert math.hypot(*parts) == pytest.approx(one[kind], rel=1e-12)
            assert [two[f"{kind}/{group}"] for group in groups] == pytest.approx(parts, rel=1e-10)
        assert one["num_zeros_in_grad"] == two["num_zeros_in_grad"] >= 0
    assert alone[0]["params_norm"] != alone[-1]["params_norm"]


NARROW = words(
    "--bf16 --use-precision-aware-optimizer --main-grads-dtype bf16 --main-params-dtype fp16 --exp-avg-dtype bf16 "
    "--exp-avg-sq-dtype bf16 --adam-beta2 0.95 --lr 3e-3 --use-distributed-optimizer"
)


@pytest.mark.wide  # tests/distributed/test_layouts_steps.py trains with such a state
@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_half_the_state_trains_nearly_the_same_and_is_kept(optimizer: str, run: Run, tmp_path: Path) -> None:
    """2 % is the tolerance for bf16's 8 bits and a loss of 4. Moments are saved as they are: a resumed run has its
    bits."""
    flags = (*LLAMA, *NO_DROPOUT, "--optimizer", optimizer, "--train-iters", STEPS)
    run(*flags, *words("--adam-beta2 0.95 --lr 3e-3"), "--save", tmp_path / "wide")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    told = run(*flags, *NARROW, "--save", whole, world_size=2).stdout
    assert "--main-params-dtype fp16: a step that changes a weight" in told
    assert losses(whole) == pytest.approx(losses(tmp_path / "wide"), rel=0.02)
    assert losses(whole)[-1] < losses(whole)[0]
    run(*flags, *NARROW, "--save", broken, "--exit-interval", 5, world_size=2, expected=85)
    run(*flags, *NARROW, "--save", broken, "--resume", "auto", world_size=2)
    assert metrics(broken) == metrics(whole)


@pytest.mark.bits
@pytest.mark.parametrize(
    ("kept", "layout", "world_size"),
    [
        pytest.param("--exp-avg-dtype int8 --exp-avg-sq-dtype int8", "--async-save", 1, marks=pytest.mark.wide),
        pytest.param(
            *("--exp-avg-dtype fp8 --exp-avg-sq-dtype fp8", "--data-parallel-sharding-strategy optim", 2),
            marks=pytest.mark.wide,
        ),
        (
            "--exp-avg-dtype fp8 --exp-avg-sq-dtype fp8 --store-param-remainders",
            "--data-parallel-sharding-strategy optim_grads_params",
            2,
        ),
    ],
    ids=["int8", "fp8, ZeRO 1", "fp8 and remainders, ZeRO 3"],
)
def test_a_resumed_run_has_the_bits_of_moments_in_8_bits(
    kept: str, layout: str, world_size: int, run: Run, tmp_path: Path
) -> None:
    """It also trains as well as one that keeps them in fp32."""
    course = (*LLAMA, *NO_DROPOUT, *words(f"--train-iters {STEPS} --bf16 --lr 3e-3 --adam-beta2 0.95"))
    run(*course, "--save", tmp_path / "wide")
    flags = (*course, *words(f"--use-precision-aware-optimizer {kept} {layout} --log-params-norm"))
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(*flags, "--save", whole, world_size=world_size)
    assert losses(whole) == pytest.approx(losses(tmp_path / "wide"), rel=0.02)
    run(*flags, "--save", broken, "--exit-interval", 5, world_size=world_size, expected=85)
    run(*flags, "--save", broken, "--resume", "auto", world_size=world_size)
    assert metrics(broken) == metrics(whole)


@pytest.mark.bits
def test_remainders_are_masters_bit_for_bit(run: Run, tmp_path: Path) -> None:
    """Runs with and without remainders have the same steps, and each resumes from the other's checkpoint."""
    course = (*LLAMA, *NO_DROPOUT, *words("--bf16 --use-distributed-optimizer --optimizer-backend megalite"))
    course = (*course, *words(f"--train-iters {STEPS} --log-params-norm"))
    kept = {"wide": (), "remainders": ("--store-param-remainders",)}
    for name, flags in kept.items():
        run(*course, *flags, "--save", tmp_path / name, "--save-interval", 5, world_size=2)
    assert metrics(tmp_path / "wide") == metrics(tmp_path / "remainders")
    for first, second in (("wide", "remainders"), ("remainders", "wide")):
        mixed = tmp_path / f"{first}, then {second}"
        begun = ("--load", tmp_path / first, "--ckpt-step", 5)
        run(*course, *kept[second], "--save", mixed, *begun, world_size=2)
        assert metrics(mixed) == metrics(tmp_path / "wide")[5:]
