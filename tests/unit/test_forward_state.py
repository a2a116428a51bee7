"""Changes that forward makes beside gradients: a step that updates the weights keeps them, and nothing else does."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import megalite
from megalite.model.router import Router
from megalite.modules.balance import measured_costs
from megalite.modules.forward_state import ForwardState
from megalite.modules.messages import find_messages
from megalite.parallel.state import states_of

STEPS, MICRO_BATCH, BATCH, WIDTH, RATE = 3, 4, 8, 3, 0.1
BAD_STEP = 1


class Restless(nn.Module):
    """Module that changes all it can: buffers in place, by assignment and by name, and generators."""

    mean: Tensor
    scale: Tensor
    last: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("scale", torch.ones(()), persistent=False)
        self.register_buffer("last", None, persistent=False)
        self.register_buffer("wide", torch.ones(1).expand(WIDTH), persistent=False)
        self.of_torch = torch.Generator().manual_seed(1)
        self.of_python, self.of_numpy = random.Random(2), np.random.RandomState(3)
        self.newer = np.random.default_rng(4)

    def forward(self, input: Tensor) -> Tensor:
        self.mean += input.detach().mean(0)
        self.scale = 0.9 * self.scale + 0.1 * input.detach().std()
        self.last = input.detach()
        drawn = self.of_python.random() + self.of_numpy.rand() + self.newer.random() + random.random()
        noise: Tensor = torch.rand(input.shape, generator=self.of_torch, dtype=input.dtype)
        return self.norm(input) / self.scale * (drawn + np.random.rand() + noise)

    def state(self) -> list[Any]:
        """Return all that forward changes."""
        every = [each for part in self.modules() for each in part._buffers.values()]
        buffers = [None if each is None else each.tolist() for each in every]
        generators = self.of_torch.get_state(), torch.default_generator.get_state()
        of_numpy = self.of_numpy.get_state()[1:], np.random.get_state()[1:]
        states = [self.of_python.getstate(), random.getstate(), self.newer.bit_generator.state]
        return [buffers, *states, *(each.tolist() for each in generators), *(str(each) for each in of_numpy)]


def test_a_forward_leaves_no_trace() -> None:
    module = Restless()
    values, tensors = torch.randn(BATCH, WIDTH), dict(module.named_buffers())
    before = module.state()
    with pytest.raises(ZeroDivisionError), ForwardState([module]).unchanged():
        (module(values) * torch.rand(())).sum().backward()
        module.register_buffer("new", torch.ones(1))
        assert module.state() != before
        raise ZeroDivisionError
    assert module.state() == before
    assert all(buffer is tensors[name] for name, buffer in module.named_buffers())


def test_measuring_and_finding_messages_leave_no_trace() -> None:
    module, values = Restless(), torch.randn(BATCH, WIDTH)
    layers = [module, nn.ReLU(inplace=True), nn.Dropout()]
    before = module.state()
    assert len(measured_costs(layers, values)) == 3
    assert module.state() == before
    assert find_messages(layers, values)[0].passes
    assert module.state() == before


# ---------------------------------------------------------------------------------------------------- runs


class Loss:
    """Loss that raises, as often as it is told, at every second call: in a first micro-batch or in a second one."""

    def __init__(self, times: int = 0) -> None:
        self.times, self._calls = times, 0

    def __call__(self, outputs: Tensor, batch: Any) -> Tensor:
        self._calls += torch.is_grad_enabled()
        if self.times and self._calls % 2 == 0:
            self.times -= 1
            raise ZeroDivisionError
        return (outputs - batch[1]).square().mean()


def samples(*, bad: bool = False, left_out: bool = False) -> list[tuple[Tensor, Tensor]]:
    """Return the samples of the steps, of which one of `BAD_STEP` is infinite or all of that step are left out."""
    generator = torch.Generator().manual_seed(5)
    steps = [[torch.randn(2, WIDTH, generator=generator, dtype=torch.float64) for _ in range(BATCH)] for _ in range(5)]
    if bad:
        steps[BAD_STEP][5][0] = torch.inf
    if left_out:
        del steps[BAD_STEP]
    return [(each[0], each[1]) for step in steps for each in step]


def model(middle: Callable[[], nn.Module] = Restless) -> nn.Module:
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), middle(), nn.Linear(WIDTH, WIDTH)).double()


def run_of(
    module: nn.Module, data: list[tuple[Tensor, Tensor]], loss: Callable[..., Any] | None = None, **options: Any
) -> megalite.Trainer:
    run = megalite.Trainer(
        module,
        loss=loss or Loss(),
        dataset=data,
        optimizer=megalite.SGD(lr=RATE, momentum=0.9, weight_decay=0.0, clip_grad=0.0),
        micro_batch_size=MICRO_BATCH,
        global_batch_size=BATCH,
        precision="fp64",
        quiet=True,
        **options,
    )
    random.seed(7)
    np.random.seed(8)
    return run


def all_of(module: nn.Module) -> list[Any]:
    return [module[1].state(), *(each.tolist() for each in module.state_dict().values())]  # type: ignore[operator, index]


def trained(data: list[tuple[Tensor, Tensor]], steps: int = STEPS, **options: Any) -> list[Any]:
    module = model()
    with run_of(module, data, **options) as run:
        while run.iteration < steps:
            run.step()
    return all_of(module)


@pytest.mark.wide_except("True")
@pytest.mark.parametrize("recompute", [False, True])
def test_an_error_in_a_step_that_the_program_catches_leaves_no_trace(recompute: bool) -> None:
    wanted = trained(samples())
    module, loss = model(), Loss()
    with run_of(module, samples(), loss, recompute=recompute) as run:
        run.step()
        before, loss.times = all_of(module), 2
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                run.step()
            assert all_of(module) == before
        while run.iteration < STEPS:
            run.step()
    assert all_of(module) == wanted


@pytest.mark.wide
def test_what_is_saved_after_an_error_is_the_step_before(tmp_path: Path) -> None:
    """A step that raises is not saved by half when the program ends."""
    whole, first, second = (model(partial(nn.BatchNorm1d, WIDTH)) for _ in range(3))
    with run_of(whole, samples()) as run:
        run.train(steps=STEPS)
    loss = Loss()
    with run_of(first, samples(), loss, save=tmp_path) as run:
        run.step()
        loss.times = 1
        with pytest.raises(ZeroDivisionError):
            run.step()
    with run_of(second, samples(), save=tmp_path) as run:
        assert run.iteration == 1
        run.train(steps=STEPS)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(second.state_dict()[name], tensor), name


@pytest.mark.wide_except("disabled-False", "validate_results-True")
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("search", ["disabled", "validate_results"])
def test_a_skipped_step_leaves_no_trace(recompute: bool, search: str) -> None:
    wanted = trained(samples(left_out=True), STEPS - 1)
    options = {"recompute": recompute, "rerun_mode": search}
    assert trained(samples(bad=True), STEPS, **options) == wanted


def test_statistics_are_those_of_plain_torch_without_the_skipped_step() -> None:
    module, expected = (model(partial(nn.BatchNorm1d, WIDTH, momentum=None)) for _ in range(2))
    with run_of(module, samples(bad=True)) as run:
        run.train(steps=STEPS)
    optimizer, loss = torch.optim.SGD(expected.parameters(), lr=RATE, momentum=0.9), Loss()
    data = samples(left_out=True)
    for step in range(STEPS - 1):
        optimizer.zero_grad()
        for first in range(step * BATCH, (step + 1) * BATCH, MICRO_BATCH):
            batch = torch.utils.data.default_collate(data[first : first + MICRO_BATCH])
            (loss(expected(batch[0]), batch) * MICRO_BATCH / BATCH).backward()
        optimizer.step()
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], tensor, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.wide
def test_an_evaluation_and_the_measurement_of_memory_leave_no_trace() -> None:
    module = model()
    with run_of(module, samples(), valid_dataset=samples(bad=True), eval_interval=1) as run:
        before = all_of(module)
        assert run.evaluate()
        assert all_of(module) == before
        run._trainer.summary()
        assert all_of(module) == before
        run.step()
        before = all_of(module)
        run.evaluate(samples()[:3])
        assert all_of(module) == before


def test_a_recomputation_repeats_what_depends_on_buffers_and_generators() -> None:
    assert trained(samples()) == trained(samples(), recompute=True)


GPT = megalite.GPTConfig(
    num_layers=1,
    hidden_size=8,
    num_attention_heads=2,
    vocab_size=16,
    max_position_embeddings=4,
    num_experts=4,
    moe_router_score_function="sigmoid",
    moe_router_load_balancing_type=("none",),
    moe_router_enable_expert_bias=True,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)


def trained_gpt(errors: int) -> list[Any]:
    """Train a GPT whose loss draws random numbers, and raises so often; return what training has changed."""
    noise = Loss(0)

    def loss(outputs: Any, batch: Any) -> Tensor:
        drawn = torch.rand(()) + random.random()
        return -(outputs.log_probabilities * drawn).sum() + noise(torch.zeros(1), [0, torch.zeros(1)])

    tokens = torch.randint(16, (2 * BATCH, 4), generator=torch.Generator().manual_seed(1))
    options = {"seq_length": 4, "loss": loss, "dataset": [{"tokens": each} for each in tokens], "quiet": True}
    with megalite.Trainer(
        GPT, optimizer=megalite.SGD(lr=RATE), micro_batch_size=MICRO_BATCH, global_batch_size=BATCH, **options
    ) as run:
        torch.manual_seed(1)
        random.seed(2)
        run.step()
        noise.times = errors
        while run.iteration < 2:
            with contextlib.suppress(ZeroDivisionError):
                run.step()
        assert noise.times == 0
        network = run._trainer.network
        changed = [*network.parameters(), *(state.values for state in states_of(network))]
        (load,) = [each.load for each in network.modules() if isinstance(each, Router)]
        assert load is not None
        return [random.getstate(), *(each.tolist() for each in (*changed, load, torch.get_rng_state()))]


@pytest.mark.wide
def test_an_error_in_a_loss_of_a_gpt_leaves_loads_and_random_numbers_as_they_were() -> None:
    assert trained_gpt(errors=2) == trained_gpt(errors=0)
