"""Refusals of models, losses and data of one's own: one message that names the module, on each rank that meets it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import megalite
from tests.distributed.own_model import Block, Cell, Samples, built, mlp
from tests.distributed.own_model_run import message_of, part_of_run
from tests.harness.rank_pool import RankFailure, RankPools
from tests.harness.wide import wide_except


class Wrong(nn.Module):
    """Layer that returns something that the next one cannot take."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.weight = kind, nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, hidden: Tensor) -> Any:
        hidden = hidden * self.weight
        return {"two": (hidden, hidden), "list": [1.0], "narrow": hidden[..., :5], "none": None}[self.kind]


def wrong(kind: str, after: int = 2) -> list[nn.Module]:
    layers = built("mlp")
    layers[after] = Wrong(kind)
    return layers


RETURNED = {
    "two": r"the forward of stage 3 \(Block\) has no argument left for output_1",
    "list": r"stage 2 \(Wrong\) returned float as output_0, which is no tensor",
    "narrow": r"stage 3 \(Block\) failed on the meta device",
    "none": r"stage 2 \(Wrong\) returned NoneType",
}


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("kind", RETURNED)
def test_a_layer_that_does_not_fit_the_next_is_named(kind: str, pp: int, rank_pools: RankPools) -> None:
    if (kind, pp) == ("narrow", 1):
        pytest.skip("in one stage, torch's own error has the place in the program")
    for message in rank_pools(pp).run(message_of, Cell("mlp", pp=pp), stages=wrong(kind)):
        assert re.match(RETURNED[kind], message), message


def with_other_placement(kind: str) -> dict[str, Any]:
    layers = built("mlp")
    if kind == "meta":
        layers[3] = Block().to("meta")
    elif kind == "memory":
        layers[4].up.weight = nn.Parameter(layers[3].up.weight.data)
    elif kind == "integers":
        layers[4].register_parameter("steps", nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False))
    return {"stages": layers}


PLACED = {
    "meta": r"3\.scale is on the meta device and has no values: give initial=",
    "integers": r"4\.steps is of torch\.int64, and parameters are floating-point numbers: make it a buffer",
    "memory": r"up\.weight of stage 3 \(Block\) and up\.weight of stage 4 \(Block\) share memory",
}


@pytest.mark.parametrize("kind", PLACED)
def test_a_tensor_that_cannot_be_trained_or_saved_is_named(kind: str, rank_pools: RankPools) -> None:
    for message in rank_pools(2).run(message_of, Cell("mlp", dp=2), **with_other_placement(kind)):
        assert re.match(PLACED[kind], message), message


def test_buffers_that_differ_at_the_start_are_named(rank_pools: RankPools) -> None:
    for message in rank_pools(3).run(message_of, Cell("conv", dp=3), other=2):
        assert message.startswith("4.running_mean has other values on rank 2 than on rank 0: build the same module")


def message_of_own_seed(pp: int) -> str:
    """Return the message on a network that each rank draws from a seed of its own."""
    torch.manual_seed(dist.get_rank())
    return message_of(Cell("mlp", pp=pp), stages=[layer.double() for layer in mlp()])


@pytest.mark.parametrize("pp", [2, 3])
def test_a_tied_weight_that_its_stages_have_built_differently_is_named(pp: int, rank_pools: RankPools) -> None:
    for message in rank_pools(pp).run(message_of_own_seed, pp):
        assert message.startswith(f"0.table.weight has other values on rank {pp - 1} than on rank 0: build the same")


def returns(value: Any) -> Any:
    return Returned(value)


class Returned:
    """Loss that returns a value."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(self, output: Tensor, values: Any) -> Any:
        total = output.sum()
        return {
            "terms": {"one": total, "two": total},
            "vector": output.sum((1, 2)),
            "number": 1.0,
            "other": {"loss": total, "extra": total},
            "missing": {},
        }[self.kind]


def counts(values: Any) -> dict[str, int]:
    return {"loss": len(values["tokens"])}


LOSSES = {
    ("terms", False): r"the loss returned the terms one, two and has no count: give Trainer\(count=",
    ("vector", False): r"the loss returned a tensor \(6,\): return a mean",
    ("number", False): r"the loss returned float: return a mean",
    ("vector", True): r"the loss of stage 0 \(\w+\) returned a tensor \(6,\) as loss: return the sum",
    ("other", True): r".*extra",
    ("missing", True): "the loss returned no terms and lacks loss, of which count returns",
}


@pytest.mark.parametrize(("kind", "counted"), LOSSES)
def test_a_loss_that_cannot_be_reduced_is_refused(kind: str, counted: bool, rank_pools: RankPools) -> None:
    (message,) = rank_pools(1).run(message_of, Cell("mlp"), loss=Returned(kind), count=counts if counted else None)
    assert re.match(LOSSES[kind, counted], message), message


def specs(dtype: torch.dtype, *, gradient: bool) -> list[tuple[megalite.TensorSpec, ...]]:
    return [(megalite.TensorSpec("hidden", (6, 4, 8), dtype, gradient),)]


NEEDED = r"stage 0 \(Layers\) returned hidden of torch.float64 that needs a gradient, and its message of"
MESSAGES = {
    "a gradient of integers": (
        specs(torch.int64, gradient=True),
        "the message hidden of torch.int64 can have no gradient",
    ),
    "integers": (specs(torch.int64, gradient=False), f"{NEEDED} torch.int64 is declared without one"),
    "no gradient": (specs(torch.float64, gradient=False), f"{NEEDED} torch.float64 is declared without one"),
}


@pytest.mark.wide
@pytest.mark.parametrize("name", wide_except(MESSAGES, ["no gradient"]))
def test_a_gradient_that_a_message_cannot_have_is_refused(name: str, rank_pools: RankPools) -> None:
    declared, expected = MESSAGES[name]
    with pytest.raises(RankFailure, match=expected):
        rank_pools(2).run_within(30, message_of, Cell("mlp", pp=2), raises=True, messages=declared)


def test_a_dataset_of_another_length_is_refused(tmp_path: Path, rank_pools: RankPools) -> None:
    cell = Cell("mlp", dp=2)
    rank_pools(2).run(part_of_run, cell, 1, save=tmp_path)
    for message in rank_pools(2).run(message_of, cell, save=tmp_path, dataset=Samples(39)):
        assert "the dataset had 40 samples when the run was saved and has 39 samples now" in message


def of_rank(layout: dict[str, Any], samples: int = 8, *, differ: bool = True) -> str:
    """Train with a dataset that is not the same on all ranks, and return what is said of it."""
    generator = torch.Generator().manual_seed(dist.get_rank() if differ else 0)
    dataset = [(torch.randn(4, generator=generator), torch.tensor(1)) for _ in range(8)]
    torch.manual_seed(0)
    try:
        with megalite.Trainer(
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)),
            loss=lambda outputs, batch: nn.functional.cross_entropy(outputs, batch[1]),
            dataset=dataset,
            optimizer=megalite.SGD(lr=0.1),
            layout=megalite.Layout(**layout),
            micro_batch_size=2,
            quiet=True,
        ) as run:
            run.evaluate(dataset[: samples + dist.get_rank()])
            return "\n".join(run._trainer.notes())
    except megalite.MegaliteError as error:
        return str(error)


def test_datasets_that_are_not_the_same_are_told(rank_pools: RankPools) -> None:
    differs = "the first sample of dataset is another on rank 1 than on rank 0"
    for message in rank_pools(2).run(of_rank, {"dp": 2}):
        assert f"note: {differs}. If ranks have parts of it, samples are lost" in message
    for message in rank_pools(2).run(of_rank, {"pp": 2}):
        assert message.startswith(f"{differs}, and ranks of a pipeline")
    for message in rank_pools(2).run(of_rank, {"dp": 2}, differ=False):
        assert "another on rank" not in message
    for message in rank_pools(2).run(of_rank, {"dp": 2}, 6, differ=False):
        assert message.startswith("the dataset of the evaluation has 6 samples on rank 0 and 7 on rank 1")


class Vectors(nn.Module):
    """Model without a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, 8, 8, dtype=torch.float64)[0, 0])

    def forward(self, input: Tensor) -> Tensor:
        return (input * self.scale).mean((1, 2))


class Vector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(8, dtype=torch.float64))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.shift


@pytest.mark.parametrize("pp", [1, 2])
def test_muon_is_refused_for_a_model_without_matrices(pp: int, rank_pools: RankPools) -> None:
    model = nn.Sequential(Vectors(), Vector())
    muon = megalite.Muon(lr=0.01)
    for message in rank_pools(pp).run(message_of, Cell("conv", pp=pp), model=model, optimizer=muon):
        assert message == "the model has no matrix that Muon could update: choose megalite.AdamW"


@pytest.mark.wide
def test_patterns_that_name_nothing_are_refused(rank_pools: RankPools) -> None:
    (message,) = rank_pools(1).run(message_of, Cell("conv"), buffers={"*.running_men": "average"})
    assert message.startswith("no buffer is called *.running_men, for which there is a rule: there are 1.running_mean,")
    for message in rank_pools(2).run(message_of, Cell("vit", pp=2), recompute=["9*"]):
        assert message.startswith("no submodule is called 9*, to be recomputed")
    assert rank_pools(2).run(message_of, Cell("vit", pp=2), recompute=["6.*"]) == ["", ""]
