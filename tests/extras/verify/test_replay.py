"""The replay, stage by stage: the oracle's loss and gradients in fp64, and several ways to round beside it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from megalite.checkpoint.tensors import Kind
from megalite.config import ModelConfig
from megalite.config.pipeline_layout import StageLayers
from megalite.data.loader import MicroBatchArrays
from megalite.extras.verify.points import Point
from megalite.extras.verify.replay import Gradients, Replay, Seen
from megalite.extras.verify.rounding import TRUTH, Numerics, emulations
from megalite.model.gpt import GPT
from megalite.parallel.sharding import Box
from tests.harness.close import assert_gradient_close, assert_number_close
from tests.oracle import loss_sum_and_count
from tests.unit.test_oracle import FFN, GPT2, HEADS, HIDDEN, LAYERS, LLAMA, POSITIONS, VOCABULARY, random_weights

pytestmark = pytest.mark.extra

_SIZES = {
    "num_layers": LAYERS,
    "hidden_size": HIDDEN,
    "ffn_hidden_size": FFN,
    "num_attention_heads": HEADS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": POSITIONS,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
_LLAMA = {
    "swiglu": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "add_bias_linear": False,
}
CASES = {
    "gpt2": (GPT2, {}, True),
    "llama": (LLAMA, _LLAMA | {"untie_embeddings_and_output_weights": True}, False),
    "tied llama": (LLAMA, _LLAMA, True),
}


class Weights:
    """Weights by logical name (a `Source`)."""

    def __init__(self, values: dict[str, Tensor]) -> None:
        self.values = values
        self.tensors = {name: Kind(tuple(value.shape), value.dtype) for name, value in values.items()}

    def fill(self, name: str, box: Box, values: Tensor) -> None:
        values.copy_(self.values[name][box.slices()])


def arrays(number: int, masked: bool = True) -> MicroBatchArrays:
    generator = np.random.default_rng(number)
    tokens = generator.integers(0, VOCABULARY, (2, 9))
    return MicroBatchArrays(
        tokens=tokens[:, :-1].copy(),
        labels=tokens[:, 1:].copy(),
        loss_mask=generator.integers(0, 2, (2, 8)).astype(np.float64) if masked else np.ones((2, 8)),
        positions=np.tile(np.arange(8), (2, 1)),
        document_ids=None,
        padding=None,
        sample_ids=[2 * number, 2 * number + 1],
        replayed=None,
    )


def replay_of(
    name: str, batches: Sequence[MicroBatchArrays], numerics: Sequence[Numerics], stages: tuple[StageLayers, ...] = ()
) -> tuple[Replay, dict[str, Tensor]]:
    oracle, fields, tied = CASES[name]
    weights = random_weights(oracle, tied=tied)
    model = ModelConfig(**_SIZES, **fields)  # type: ignore[arg-type]
    return Replay(model, Weights(weights), "a test", batches, numerics, stages=stages), weights


@pytest.mark.parametrize("name", CASES)
def test_the_replay_is_the_oracle(name: str) -> None:
    batches = [arrays(number) for number in range(2)]
    replay, weights = replay_of(name, batches, [TRUTH, Numerics(torch.float64, parts=2)])
    leaves = {key: value.clone().requires_grad_() for key, value in weights.items()}
    factors = [0.3, 0.7]
    total = torch.zeros((), dtype=torch.float64)
    for batch, factor in zip(batches, factors, strict=True):
        tokens, labels, mask, positions = (
            torch.from_numpy(batch[key]) for key in ("tokens", "labels", "loss_mask", "positions")
        )
        loss, _ = loss_sum_and_count(CASES[name][0].logits(leaves, tokens, positions), labels, mask)
        total = total + loss * factor
    total.backward()
    sums = [seen.terms[0]["lm_loss"] for seen in replay.forward() if seen.stage.loss]
    assert_number_close(sum(a * b for a, b in zip(sums, factors, strict=True)), total.item())
    found: list[dict[str, Tensor]] = [{}, {}]
    for each in replay.backward([{"lm_loss": factor} for factor in factors]):
        if isinstance(each, Gradients):
            for mine, values in zip(found, each.values, strict=True):
                assert not mine.keys() & values.keys()
                mine.update(values)
    norm = torch.stack([leaf.grad.norm() for leaf in leaves.values() if leaf.grad is not None]).norm().item()
    for gradients in found:
        assert gradients.keys() == weights.keys()
        for key, gradient in gradients.items():
            expected = leaves[key].grad
            assert expected is not None
            assert_gradient_close(gradient, expected, norm, key)


def test_gradients_of_points_are_those_of_the_whole_network() -> None:
    whole = (StageLayers(0, LAYERS, embedding=True, loss=True),)
    seen: list[dict[Point, Tensor]] = []
    for stages in ((), whole):
        replay, _ = replay_of("tied llama", [arrays(0)], [TRUTH], stages)
        for _ in replay.forward():
            pass
        found: dict[Point, Tensor] = {}
        for each in replay.backward([{"lm_loss": 0.5}]):
            if isinstance(each, Seen):
                found |= each.values[0]
        seen.append(found)
    by_stages, at_once = seen
    assert by_stages.keys() >= {*at_once} - {Point("layers.1", "input_gradient")}
    for point, values in at_once.items():
        if point in by_stages:
            torch.testing.assert_close(by_stages[point], values, rtol=1e-10, atol=1e-14)
    assert Point("head.output", "output_gradient") in by_stages
    assert Point("layers.1.attention.query_key_value", "output_gradient") in by_stages


def test_other_orders_of_sums_round_otherwise_and_agree_in_fp64() -> None:
    numerics = [TRUTH, *emulations(torch.bfloat16, 4), *emulations(torch.float64, 4)]
    replay, _ = replay_of("llama", [arrays(0)], numerics)
    point = Point("layers.1", "output")
    (values,) = [[each[point].double() for each in seen.values] for seen in replay.forward() if point in seen.values[0]]
    truth, *others = values
    errors = [float((each - truth).norm() / truth.norm()) for each in others]
    assert all(1e-3 < error < 5e-2 for error in errors[:3])  # a few roundings to 8 bits
    assert len({*errors[:3]}) == 3
    assert errors[3] == 0.0
    assert all(0.0 < error < 1e-14 for error in errors[4:])


def test_only_one_layer_is_in_memory_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[GPT]] = []
    most = 0
    make = Replay.network

    def counted(self: Replay, stage: StageLayers, dtype: torch.dtype, model: ModelConfig | None = None) -> GPT:
        nonlocal most
        found = make(self, stage, dtype, model)
        alive.append(weakref.ref(found))
        gc.collect()
        most = max(most, sum(len(network.layers) for ref in alive if (network := ref()) is not None))
        return found

    monkeypatch.setattr(Replay, "network", counted)
    replay, _ = replay_of("llama", [arrays(0)], [TRUTH, Numerics(torch.bfloat16)])
    for _ in replay.forward():
        pass
    for _ in replay.backward([{"lm_loss": 1.0}]):
        pass
    assert len(alive) == 2 * 2 * LAYERS
    assert most == 2  # one layer in two precisions
