"""Plain modules as stages: they train as a loop of plain torch does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megalite
from megalite.config.optimizer import OptimizerConfig
from megalite.errors import MegaliteError
from megalite.modules.buffers import KeptBuffers
from megalite.modules.messages import find_messages
from megalite.modules.records import give_records, value_setter
from megalite.modules.stage import ModuleStage, Objective
from megalite.optim.buckets import DataParallel
from megalite.optim.learning_rate import Rates
from megalite.optim.optimizer import make_optimizer
from megalite.parallel.mesh import ParallelMesh
from megalite.pipeline.engine import PipelineEngine
from megalite.pipeline.lowering import Reductions, lower
from megalite.pipeline.schedules import Action
from megalite.pipeline.stages import Stages

RATE, DECAY, STEPS, MICRO_BATCHES, SAMPLES = 0.01, 0.1, 3, 2, 4
ADAMW = OptimizerConfig(lr=RATE, weight_decay=DECAY, clip_grad=0.0)


@dataclass(frozen=True)
class Batch:
    values: Any
    sample_ids: Sequence[int]


def images(step: int, number: int) -> Batch:
    generator = torch.Generator().manual_seed(10 * step + number)
    image = torch.randn(SAMPLES, 3, 8, 8, generator=generator, dtype=torch.float64)
    label = torch.randint(5, (SAMPLES,), generator=generator)
    first = (step * MICRO_BATCHES + number) * SAMPLES
    return Batch({"input": image, "label": label}, range(first, first + SAMPLES))


def loss(output: Tensor, values: Any) -> Tensor:
    return F.cross_entropy(output, values["label"], reduction="sum")


class Scaled(nn.Module):
    """Module with a parameter without dimensions, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.shift = nn.Parameter(torch.tensor(0.5, dtype=torch.float64), requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.scale + self.shift


def layers() -> list[nn.Module]:
    torch.manual_seed(1)
    made = [
        nn.Conv2d(3, 4, 3, bias=False),  # before BatchNorm its gradient is only rounding
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        Scaled(),
        nn.Flatten(),
        nn.Linear(144, 16),
        nn.Linear(16, 5),
    ]
    return [layer.double() for layer in made]


def cut(made: Sequence[nn.Module], parts: Sequence[range]) -> list[nn.Module]:
    found: list[nn.Module] = []
    for part in parts:
        stage = nn.Sequential()
        for number in part:
            stage.add_module(str(number), made[number])
        found.append(stage)
    return found


@dataclass
class Run:
    """Engine and optimizer of all stages on one rank."""

    modules: Sequence[nn.Module]
    values: Any
    loss: Any = loss
    zero: int = 0
    allow_unused: bool = False
    recompute: bool | Sequence[str] = False
    optimizer_config: OptimizerConfig = ADAMW

    def __post_init__(self) -> None:
        mesh, count = ParallelMesh(), len(self.modules)
        plans = find_messages(self.modules, self.values)
        of_stages = give_records(self.modules, mesh)
        self.chunks = [
            ModuleStage(
                module,
                mesh,
                plan,
                number=number,
                count=count,
                objective=Objective(self.loss),
                kept=KeptBuffers(module, mesh),
                uses=uses,
                recompute=self.recompute,
                one_block=self.allow_unused,
            )
            for number, (module, plan, uses) in enumerate(zip(self.modules, plans, of_stages, strict=True))
        ]
        self.optimizer = make_optimizer(
            self.chunks,
            mesh,
            self.optimizer_config,
            DataParallel(torch.float64, self.zero, allow_unused=self.allow_unused),
            blocks=[chunk.blocks() for chunk in self.chunks],
            set_values=value_setter(self.chunks, seed=1),
        )
        self.stages = Stages(1, count, messages=tuple(plan.passes for plan in plans[:-1]))
        self.engine: PipelineEngine[Any] = PipelineEngine(self.chunks, self.stages, device=mesh.device)

    def step(self, batches: Sequence[Any]) -> dict[str, Tensor]:
        order = [
            action
            for number in range(len(batches))
            for action in (
                *(Action("F", number, chunk) for chunk in range(len(self.chunks))),
                *(Action("B", number, chunk) for chunk in reversed(range(len(self.chunks)))),
            )
        ]
        (actions,) = lower(self.stages, [order], Reductions(per_micro_batch=self.zero >= 2))
        samples = sum(len(batch.sample_ids) for batch in batches)
        self.optimizer.begin_step(len(batches))
        sums = self.engine.run(actions, batches, {"loss": 1 / samples}, self.optimizer)
        self.optimizer.step(Rates(RATE, RATE, weight_decay=self.optimizer_config.weight_decay))
        for chunk in self.chunks:
            assert chunk.kept is not None
            chunk.kept.synchronize()
        return sums


def plainly(module: nn.Module, batches: Any, call: Any, steps: int = STEPS) -> None:
    """Train with torch's AdamW; vectors do not decay."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": DECAY},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.999), eps=1e-8)
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(MICRO_BATCHES):
            call(module, batches(step, number)).div(SAMPLES * MICRO_BATCHES).backward()
        optimizer.step()


def assert_same_state(modules: Sequence[nn.Module], expected: nn.Module) -> None:
    found = {name: tensor for module in modules for name, tensor in module.state_dict().items()}
    wanted = expected.state_dict()
    for name, tensor in wanted.items():
        if name in found:  # a tied weight has one name
            torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("recompute", [False, True, ["1", "5"]], ids=["stored", "recomputed", "two recomputed"])
@pytest.mark.parametrize("parts", [[range(7)], [range(2), range(2, 5), range(5, 7)]], ids=["one", "three"])
@pytest.mark.parametrize("zero", [0, 3])
def test_stages_train_as_a_plain_loop(parts: list[range], zero: int, recompute: bool | list[str]) -> None:
    if len(parts) > 1 and not isinstance(recompute, bool):
        pytest.skip("each stage needs such a submodule")
    expected = nn.Sequential(*layers())
    plainly(expected, images, lambda module, batch: loss(module(batch.values["input"]), batch.values))
    run = Run(cut(layers(), parts), images(0, 0).values, zero=zero, recompute=recompute)
    for step in range(STEPS):
        run.step([images(step, number) for number in range(MICRO_BATCHES)])
    assert_same_state(run.modules, expected)


class Shifted(nn.Module):
    """Module with a shift that is no trained parameter: a buffer, or a frozen one."""

    def __init__(self, shift: Tensor | nn.Parameter) -> None:
        super().__init__()
        self.scores = nn.Linear(4, 5)
        if isinstance(shift, nn.Parameter):
            self.shift = shift
        else:
            self.register_buffer("shift", shift)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.scores(x) + self.shift
        return scores


def test_frozen_weights_that_were_saved_as_state_are_read(tmp_path: Path) -> None:
    """Earlier versions saved them as they save buffers."""
    frozen = nn.Parameter(torch.zeros(5), requires_grad=False)
    for number, model in enumerate((Shifted(torch.arange(5.0)), Shifted(frozen))):
        with megalite.Trainer(
            model,
            loss=lambda scores, batch: scores.square().mean(),
            dataset=[torch.ones(4)] * 8,
            optimizer=megalite.AdamW(lr=0.1),
            micro_batch_size=4,
            save=tmp_path,
            quiet=True,
        ) as run:
            assert run.iteration == number
            run.train(steps=number + 1)
    assert model.shift.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


class Sometimes(nn.Module):
    """Module with a branch that some batches do not use, and one that none uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.always = nn.Linear(4, 4).double()
        self.sometimes = nn.Linear(4, 4).double()
        self.never = nn.Linear(4, 4).double()

    def forward(self, x: Tensor, branches: bool) -> Tensor:
        x = self.always(x)
        return x + self.sometimes(x) if branches else x


def numbers(step: int, number: int) -> Batch:
    generator = torch.Generator().manual_seed(10 * step + number)
    x = torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64)
    return Batch({"x": x, "branches": step == 1 and number == 0}, range(SAMPLES))


def square(output: Tensor, values: Any) -> Tensor:
    return output.square().sum()


@pytest.mark.parametrize("zero", [0, 3])
def test_gradients_of_unused_parameters_are_zero_if_that_is_allowed(zero: int) -> None:
    expected = Sometimes()
    optimizer = torch.optim.SGD(expected.parameters(), lr=RATE)
    sgd = OptimizerConfig(lr=RATE, optimizer="sgd", sgd_momentum=0.0, weight_decay=0.0, clip_grad=0.0)
    run = Run([Sometimes()], numbers(0, 0).values, square, zero, allow_unused=True, optimizer_config=sgd)
    for step in range(STEPS):
        run.step([numbers(step, number) for number in range(MICRO_BATCHES)])
        optimizer.zero_grad()
        for number in range(MICRO_BATCHES):
            values = numbers(step, number).values
            (square(expected(**values), values) / (SAMPLES * MICRO_BATCHES)).backward()
        optimizer.step()
    assert_same_state(run.modules, expected)


def test_unused_parameters_are_named() -> None:
    run = Run([Sometimes()], numbers(0, 0).values, square)
    with pytest.raises(MegaliteError, match=r"never\.bias received 0 of the 2 gradients due.*also too few: never"):
        run.step([numbers(1, 0), numbers(1, 0)])


def test_muon_updates_matrices_and_kernels_but_not_vectors() -> None:
    """Each update of a kernel has singular values of about one, as a matrix [out, in * height * width]."""
    muon = OptimizerConfig(lr=RATE, optimizer="muon", weight_decay=0.0, clip_grad=0.0, muon_scale_mode="unit_rms_norm")
    run = Run([nn.Sequential(*layers())], images(0, 0).values, optimizer_config=muon)
    before = {name: tensor.clone() for name, tensor in run.modules[0].state_dict().items()}
    run.step([images(0, 0)])
    after = run.modules[0].state_dict()
    for name in ("0.weight", "5.weight"):
        update = (before[name] - after[name]).flatten(1)
        singular = torch.linalg.svdvals(update)[:SAMPLES]  # the gradient has no higher rank
        assert singular.min() > 0.6 * singular.max(), name
    steps = (before["6.bias"] - after["6.bias"]).abs()
    torch.testing.assert_close(steps, torch.full_like(steps, RATE), rtol=1e-4, atol=0.0)  # the first step of AdamW
