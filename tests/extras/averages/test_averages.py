"""Averages of checkpoints are numpy's float64 sums, rounded once; they, and the means of runs, go where models go."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megalite.inference.loading import load_network, open_model
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import named_pieces
from tests.end_to_end.runs import (
    BYTES,
    LLAMA,
    NO_DROPOUT,
    PRETRAIN,
    Run,
    assert_same_checkpoint,
    ended,
    saved_tensors,
    saved_weights,
    words,
)
from tests.harness.close import assert_bits_equal
from tests.harness.job import Job
from tests.harness.tool import run_tool

DECAY = 0.75
FLAGS = (*LLAMA, *NO_DROPOUT, "--bf16", "--lr-decay-style", "constant", "--save-interval", "1")
KEPT = ("--ema-decay", str(DECAY))


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run directory of three steps in bf16 that keep a mean, with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("trunk")
    argv: list[Any] = [PRETRAIN, *BYTES, *FLAGS, *KEPT, "--train-iters", 3, "--save", folder / "run"]
    with Job([*argv, "--use-distributed-optimizer"], 2, folder / "job") as job:
        ended(job)
    return folder / "run"


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run directory of two steps of a smaller network, without a mean."""
    folder = tmp_path_factory.mktemp("other")
    argv: list[Any] = [PRETRAIN, *BYTES, *FLAGS, "--num-layers", 1, "--train-iters", 2, "--save", folder / "run"]
    with Job(argv, 1, folder / "job") as job:
        ended(job)
    return folder / "run"


def tool(name: str, *flags: object) -> str:
    """Run a command that succeeds; return what it prints."""
    found = run_tool(name, *flags)
    assert found.code == 0, found.stdout + found.stderr
    return found.stdout


def evaluated(folder: Path, *flags: object) -> Any:
    """Return the figures of text.txt in a folder."""
    tool("evaluate", *flags, "--text", folder / "text.txt", "--output", folder / "figures.json")
    return json.loads((folder / "figures.json").read_text())["data"]


def assert_exported(folder: Path, weights: dict[str, Tensor], *flags: object) -> None:
    """Export a model as a Hugging Face folder; assert its embedding and the norms of its layers."""
    tool("convert", *words("--loader megalite --saver hf --save-dir"), folder, *flags)
    exported = load_file(folder / "model.safetensors")
    assert_bits_equal(exported["model.embed_tokens.weight"], weights["embedding.word"], "embedding")
    for layer in range(2):
        name = f"layers.{layer}.mlp.down"
        assert_bits_equal(exported[f"model.layers.{layer}.mlp.down_proj.weight"], weights[name], name)


def step(directory: Path, number: int) -> Path:
    return directory / f"iter_{number:07d}"


def in_bf16(values: np.ndarray[Any, Any]) -> Tensor:
    """Round float64 values to the eight bits of bf16, to nearest, ties to even."""
    mantissa, exponent = np.frexp(values)
    return torch.from_numpy(np.ldexp(np.rint(np.ldexp(mantissa, 8)), exponent - 8)).bfloat16()


def expected(checkpoints: list[Path], weights: list[float], kind: str = "optimizer/master") -> dict[str, Tensor]:
    """Return the sums of masters, or of other values of each weight, in bf16."""
    each = [saved_tensors(path) for path in checkpoints]
    names = [name.removeprefix("model/") for name in each[0] if name.startswith("model/")]
    found = {}
    for name in names:
        total = 0.0
        for tensors, weight in zip(each, weights, strict=True):
            total = total + tensors[f"{kind}/{name}"].numpy().astype(np.float64) * weight
        found[name] = in_bf16(np.asarray(total))
    return found


def assert_weights(checkpoint: Path, wanted: dict[str, Tensor]) -> None:
    found = saved_weights(checkpoint)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert_bits_equal(found[name], tensor, name)


# ------------------------------------------------------------------------------------------------- of checkpoints


HEIGHTS = {
    "linear": lambda t: 1 - t,
    "cosine": lambda t: (1 + np.cos(np.pi * t)) / 2,
    "minus_sqrt": lambda t: 1 - t**0.5,
}
OF_DECAYS = {
    style: [float(first - second) for first, second in pairwise(height(place / 3) for place in range(4))]
    for style, height in HEIGHTS.items()
}


@pytest.mark.parametrize(
    ("flags", "weights"),
    [
        ("", [1 / 3] * 3),
        ("--weights 0.2 -0.3 1.1", [0.2, -0.3, 1.1]),
        ("--method ema --decay 0.9", [0.9 * 0.9, 0.1 * 0.9, 0.1]),
        *((f"--method wsm --decay-style {style}", weights) for style, weights in OF_DECAYS.items()),
    ],
)
def test_an_average_is_numpys_sum_rounded_once(flags: str, weights: list[float], trunk: Path, tmp_path: Path) -> None:
    out = tool("merge-checkpoints", "--load", trunk, "--steps", 1, 2, 3, "--save", tmp_path / "new", *words(flags))
    merged = step(tmp_path / "new", 3)
    origin = json.loads((merged / "manifest.json").read_text())["config"]["merged"]
    assert [(each["path"], each["step"]) for each in origin["checkpoints"]] == [
        (str(step(trunk, number)), number) for number in (1, 2, 3)
    ]
    taken = [each["weight"] for each in origin["checkpoints"]]
    assert taken == pytest.approx(weights, rel=1e-12)
    assert sum(taken) == pytest.approx(1.0, abs=1e-15)
    assert_weights(merged, expected([step(trunk, number) for number in (1, 2, 3)], taken))
    assert f"{taken[1]:.6g} of {step(trunk, 2)}" in out


def test_an_average_goes_where_models_go(run: Run, trunk: Path, tmp_path: Path) -> None:
    merged = tmp_path / "merged"
    tool("merge-checkpoints", "--load", step(trunk, 1), trunk, "--save", merged)
    weights = saved_weights(step(merged, 3))
    flags = [*FLAGS, "--load", merged, "--lr", 0, "--weight-decay", 0]
    layout = words("--tensor-model-parallel-size 2 --sequence-parallel")
    new = ["--finetune", "--save", tmp_path / "new", "--train-iters", 1]
    out = run(*flags, *layout, *new, data=BYTES, world_size=2).stdout
    assert "unknown to this version" not in out
    assert_weights(step(tmp_path / "new", 1), weights)
    run(*flags, "--no-load-optim", "--save", tmp_path / "same", "--train-iters", 4, data=BYTES)
    assert_weights(step(tmp_path / "same", 4), weights)
    (tmp_path / "text.txt").write_text("naïve café")
    assert evaluated(tmp_path, "--load", merged) != evaluated(tmp_path, "--load", trunk)
    assert tool("generate", "--load", merged, "--prompt", "a", *words("--max-new-tokens 2")).startswith("a")
    assert_exported(tmp_path / "hf", weights, "--load-dir", merged)


# ------------------------------------------------------------------------------------------------- that a run keeps


def test_the_mean_of_a_run_is_that_of_its_masters(trunk: Path) -> None:
    """The checkpoints of each step have it; the first one's is not far from the initial weights."""
    for number in (2, 3):
        before, after = (saved_tensors(step(trunk, each)) for each in (number - 1, number))
        for name in saved_weights(step(trunk, number)):
            master, mean = after[f"optimizer/master/{name}"], before[f"optimizer/ema/{name}"]
            assert_bits_equal(after[f"optimizer/ema/{name}"], mean * DECAY + master * (1 - DECAY), name)


def test_tools_take_the_mean_in_place_of_the_weights(trunk: Path, tmp_path: Path) -> None:
    wanted = expected([step(trunk, 3)], [1.0], "optimizer/ema")
    assert_exported(tmp_path / "hf", wanted, "--load-dir", trunk, "--ema")
    network = load_network(open_model(trunk, mean=True), ParallelMesh())
    for parameter, piece in named_pieces(network.stage):
        assert_bits_equal(piece.view(parameter.detach()), wanted[piece.tensor.name], piece.tensor.name)
    (tmp_path / "text.txt").write_text("naïve café")
    assert evaluated(tmp_path, "--load", trunk, "--ema") != evaluated(tmp_path, "--load", trunk)
    assert tool("generate", "--load", trunk, "--ema", "--prompt", "a", *words("--max-new-tokens 2")).startswith("a")
    tool("merge-checkpoints", "--load", trunk, "--steps", 2, 3, "--ema", "--save", tmp_path / "mean")
    of_means = expected([step(trunk, 2), step(trunk, 3)], [0.5, 0.5], "optimizer/ema")
    assert_weights(step(tmp_path / "mean", 3), of_means)


def test_a_run_goes_on_with_its_mean_begins_one_or_leaves_it(run: Run, trunk: Path, tmp_path: Path) -> None:
    def goes_on(name: str, load: Path, at: int, *flags: str) -> str:
        more = ["--load", load, "--ckpt-step", at, "--save", tmp_path / name, "--train-iters", at + 1, *flags]
        return run(*FLAGS, *more, data=BYTES, world_size=2 if name == "same" else 1).stdout

    assert "no ema" not in goes_on("same", trunk, 2, *KEPT, "--use-distributed-optimizer")
    assert_same_checkpoint(step(tmp_path / "same", 3), step(trunk, 3))
    out = goes_on("without", trunk, 2)
    assert "note: this run has no ema: the checkpoint's is left out" in out
    assert not [name for name in saved_tensors(step(tmp_path / "without", 3)) if "/ema/" in name]
    out = goes_on("anew", tmp_path / "without", 3, *KEPT)
    assert "note: the checkpoint has no ema for some weights: it begins with the weights" in out
    before, after = saved_tensors(step(tmp_path / "without", 3)), saved_tensors(step(tmp_path / "anew", 4))
    for name in saved_weights(step(tmp_path / "anew", 4)):
        masters = [each[f"optimizer/master/{name}"] for each in (before, after)]
        mean = masters[0] * DECAY + masters[1] * (1 - DECAY)
        assert_bits_equal(after[f"optimizer/ema/{name}"], mean, name)


# ------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--load {a} --save new", "there is nothing to average: give at least two --steps of one --load"),
        ("--load {a} --steps 1 --save new", "there is nothing to average"),
        ("--load {a} {a} --steps 1 2 --save new", "--steps are of one run directory: give one --load"),
        ("--load {a} --steps 1 7 --save new", "--steps 7: {a} has only steps 1, 2, 3"),
        ("--load {a} --steps 1 1 --save new", "iter_0000001 is there twice, or is a copy"),
        ("--load {a}/iter_0000003 {a} --save new", "iter_0000003 is there twice, or is a copy"),
        ("--load {a} --steps 1 2 --weights 0.5 --save new", "--weights: there are 1 for 2 checkpoints"),
        (
            "--load {a} --steps 1 2 --weights 1 3 --save new",
            "--weights are 4 together, and must be 1: divided by their sum they are 0.25 0.75",
        ),
        (
            "--load {a} --steps 1 2 --weights 0.5 0.5 --method ema --save new",
            "--method ema has no effect with --weights",
        ),
        ("--load {a} --steps 1 2 --method ema --save new", "--method ema needs --decay, such as 0.9"),
        ("--load {a} --steps 1 2 --method wsm --save new", "--method wsm needs --decay-style"),
        ("--load {a} --steps 1 2 --decay 0.5 --save new", "--decay needs --method ema"),
        ("--load {a} --steps 2 1 --method ema --decay 0.5 --save new", "whose steps are 2, 1: give the oldest first"),
        ("--load {a}/iter_0000001 {b} --save new", "num_layers: 2 in the checkpoint, 1 in this run"),
        ("--load {a} --steps 1 2 --save {a}", "iter_0000002 already exists: choose another folder"),
        (
            "--load {b}/iter_0000001 {b} --ema --save new",
            "has no mean of the weights: it was saved without --ema-decay",
        ),
    ],
)
def test_what_cannot_be_averaged_is_one_line(
    flags: str, problem: str, trunk: Path, other: Path, tmp_path: Path
) -> None:
    places = {"a": str(trunk), "b": str(other)}
    given = words(flags.format(**places).replace(" new", f" {tmp_path}/new"))
    found = run_tool("merge-checkpoints", *given)
    assert found.code in (64, 93)
    assert problem.format(**places) in found.stderr
    assert not list((tmp_path / "new").glob("iter*"))
