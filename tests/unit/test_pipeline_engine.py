"""The engine on one process: the list of actions decides what runs when, and what is alive."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.errors import MegaliteError
from megalite.parallel.collectives import Pending, completed
from megalite.parallel.parameter import DeferredGradients
from megalite.parallel.stage import StageOutput
from megalite.pipeline.checker import Collective
from megalite.pipeline.engine import PipelineEngine, Recording
from megalite.pipeline.lowering import Reductions
from megalite.pipeline.point_to_point import Links
from megalite.pipeline.proved_schedules import ProvedSchedules
from megalite.pipeline.schedules import Action
from megalite.pipeline.simulator import ScheduleError
from megalite.pipeline.stages import Stages
from tests.harness.stages import HIDDEN, LOSS, as_stage, passing_hidden

CPU = torch.device("cpu")


class Stage(torch.nn.Module):
    """(weight * x).square().sum(), with a record of the live tensors when a forward begins."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
        self.activations: list[weakref.ref[Tensor]] = []
        self.alive: list[int] = []

    def forward(self, hidden: Tensor | None, x: Tensor) -> Tensor:
        gc.collect()
        self.alive.append(sum(reference() is not None for reference in self.activations))
        product = self.weight * x
        self.activations.append(weakref.ref(product))
        return product.square().sum()


MICRO_BATCHES = [torch.tensor([1.0, 0.5]), torch.tensor([3.0, -1.0]), torch.tensor([0.0, 2.0])]


FACTORS = {LOSS: 1.0}


def engine_of(stage: Stage) -> PipelineEngine[Tensor]:
    return PipelineEngine([as_stage(stage, last=True)])


class Gradients:
    """Recorder of the calls to the gradients' side."""

    def __init__(self, stage: Stage | None = None) -> None:
        self.stage = stage
        self.counts: list[int] = []
        self.seen: list[Tensor] = []

    @contextmanager
    def deferring(self, chunk: int) -> Iterator[DeferredGradients]:
        raise AssertionError("these schedules defer nothing")
        yield

    def leave_out(self, chunk: int) -> None:
        raise AssertionError("these steps leave nothing out")

    def reduce(self, chunk: int, micro_batches: int) -> None:
        self.counts.append(micro_batches)
        if self.stage is not None and self.stage.weight.grad is not None:
            self.seen.append(self.stage.weight.grad.clone())


def test_the_sum_of_losses_is_differentiated_at_the_given_scale() -> None:
    stage = Stage()
    total = engine_of(stage).run(ProvedSchedules().prove([3]).training(3), MICRO_BATCHES, {LOSS: 0.25})[LOSS]
    loss = sum((stage.weight.detach() * x).square().sum().item() for x in MICRO_BATCHES)
    assert total.item() == loss
    assert total.dtype == torch.float64
    assert not total.requires_grad
    assert stage.weight.grad is not None
    torch.testing.assert_close(stage.weight.grad, 0.25 * 2 * stage.weight.detach() * sum(x**2 for x in MICRO_BATCHES))


def test_one_micro_batchs_activations_live_at_a_time() -> None:
    stage = Stage()
    engine_of(stage).run(ProvedSchedules().prove([3]).training(3), MICRO_BATCHES, FACTORS)
    assert stage.alive == [0, 0, 0]


@pytest.mark.wide
def test_forward_alone_keeps_no_graph() -> None:
    stage = Stage()
    total = engine_of(stage).run(ProvedSchedules().prove([], [3]).evaluation(3), MICRO_BATCHES)[LOSS]
    assert total.item() > 0
    assert stage.weight.grad is None
    assert stage.alive == [0, 0, 0]


def test_any_order_in_which_a_forward_precedes_its_backward_is_executed() -> None:
    stage, other = Stage(), Stage()
    order = [Action("F", 1), Action("F", 0), Action("B", 0), Action("F", 2), Action("B", 2), Action("B", 1)]
    engine_of(stage).run(order, MICRO_BATCHES, FACTORS)
    engine_of(other).run(ProvedSchedules().prove([3]).training(3), MICRO_BATCHES, FACTORS)
    torch.testing.assert_close(stage.weight.grad, other.weight.grad)


@pytest.mark.wide_except("True")
@pytest.mark.parametrize("each", [False, True])
def test_reductions_are_actions_behind_the_backward_that_completes_them(each: bool) -> None:
    stage = Stage()
    gradients = Gradients(stage)
    actions = ProvedSchedules(reductions=Reductions(per_micro_batch=each)).prove([3]).training(3)
    engine_of(stage).run(actions, MICRO_BATCHES, FACTORS, gradients)
    assert gradients.counts == ([1, 2, 3] if each else [3])
    assert "".join(action.kind for action in actions) == ("FBRFBRFBR" if each else "FBFBFBR")
    done = [2 * stage.weight.detach() * sum(x**2 for x in MICRO_BATCHES[:count]) for count in (1, 2, 3)]
    torch.testing.assert_close(gradients.seen, done if each else done[-1:])


def test_a_step_of_no_micro_batch_has_no_loss() -> None:
    assert engine_of(Stage()).run([], []) == {}


# ---------------------------------------------------------------------------------------- two stages on one process

ON_ONE_RANK = Stages(1, 2, v_shaped=True)


class First(torch.nn.Module):
    """Stage that returns the wanted hidden states, made by the wanted last operation."""

    def __init__(self, shape: tuple[int, ...] = (2,), dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(shape, dtype=dtype))

    def forward(self, hidden: Tensor | None, x: Tensor) -> Tensor:
        return torch.tanh(self.weight)


class Last(torch.nn.Module):
    def forward(self, hidden: Tensor | None, x: Tensor) -> Tensor:
        assert hidden is not None
        return (hidden * x).sum()


class Ignoring(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, hidden: Tensor | None, x: Tensor) -> Tensor:
        return self.weight * x.sum()


def on_one_rank(first: torch.nn.Module, last: torch.nn.Module) -> PipelineEngine[Tensor]:
    both = [as_stage(first, last=False), as_stage(last, last=True)]
    return PipelineEngine(both, passing_hidden(ON_ONE_RANK, (2,)), device=CPU)


def test_stages_of_one_rank_pass_hidden_states_on_without_a_message() -> None:
    first = First()
    actions = ProvedSchedules(ON_ONE_RANK, schedule="zb-v").prove([3]).training(3)
    assert {action.kind for action in actions} == {"F", "I", "W", "R"}
    total = on_one_rank(first, Last()).run(actions, MICRO_BATCHES, FACTORS)[LOSS]
    expected = sum((torch.tanh(torch.ones(2, dtype=torch.float64)) * x).sum() for x in MICRO_BATCHES)
    assert total == expected
    slope = 1 - torch.tanh(torch.ones(2, dtype=torch.float64)) ** 2
    torch.testing.assert_close(first.weight.grad, slope * sum(MICRO_BATCHES))


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (First((3,)), r"stage 0 returned hidden states \(3,\) of torch.float64 for micro-batch 0.*expects \(2,\)"),
        (First(dtype=torch.float32), r"stage 0 returned hidden states \(2,\) of torch.float32.*of torch.float64"),
    ],
)
def test_an_output_that_the_next_stage_cannot_take_is_told(first: First, message: str) -> None:
    with pytest.raises(MegaliteError, match=message):
        on_one_rank(first, Last()).run(
            ProvedSchedules(ON_ONE_RANK, schedule="zb-v").prove([1]).training(1), MICRO_BATCHES, FACTORS
        )


def test_a_stage_that_leaves_its_input_out_is_told() -> None:
    with pytest.raises(MegaliteError, match="stage 1 did not use its input for micro-batch 0: hidden states"):
        on_one_rank(First(), Ignoring()).run(
            ProvedSchedules(ON_ONE_RANK, schedule="zb-v").prove([1]).training(1), MICRO_BATCHES, FACTORS
        )


def test_terms_of_any_stage_are_differentiated_at_their_own_scales() -> None:
    first, last = First(), Last()

    def with_terms(inputs: Mapping[str, Tensor], x: Tensor) -> StageOutput:
        hidden = first(None, x)
        return StageOutput({HIDDEN: hidden}, {"square": hidden.square().sum(), "weight": first.weight.sum()})

    def ends(inputs: Mapping[str, Tensor], x: Tensor) -> StageOutput:
        hidden = inputs[HIDDEN]
        return StageOutput({}, {LOSS: last(hidden, x), "square": hidden.square().sum() * 2})

    engine = PipelineEngine([with_terms, ends], passing_hidden(ON_ONE_RANK, (2,)), device=CPU)
    factors = {LOSS: 0.5, "square": 3.0, "weight": 0.25}
    sums = engine.run(ProvedSchedules(ON_ONE_RANK, schedule="zb-v").prove([3]).training(3), MICRO_BATCHES, factors)
    weight = torch.ones(2, dtype=torch.float64, requires_grad=True)
    hidden = torch.tanh(weight)
    square = 3 * 3 * hidden.square().sum()  # three micro-batches, one and two of it a stage
    (0.5 * (hidden * sum(MICRO_BATCHES)).sum() + 3.0 * square + 0.25 * 3 * weight.sum()).backward()
    torch.testing.assert_close(first.weight.grad, weight.grad)
    torch.testing.assert_close(sums["square"], square.detach())
    assert sums["weight"].item() == 6.0
    assert {total.dtype for total in sums.values()} == {torch.float64}


def test_a_term_that_nobody_has_declared_is_told_at_once() -> None:
    """In its forward, before other stages get what it passes on."""
    stage = Stage()
    actions = ProvedSchedules(schedule="gpipe").prove([3]).training(3)
    with pytest.raises(MegaliteError, match="stage 0 returned a term of the loss that is not declared: lm_loss"):
        engine_of(stage).run(actions, MICRO_BATCHES, {"other": 1.0})
    assert len(stage.alive) == 1


@pytest.mark.parametrize(
    ("term", "shown"),
    [
        (torch.ones(2), r"\(2,\) of torch.float32"),
        (torch.ones((), dtype=torch.int64), r"\(\) of torch.int64"),
        (torch.ones((), dtype=torch.bfloat16), r"\(\) of torch.bfloat16"),
        (1.0, "float"),
    ],
    ids=["vector", "integer", "narrow", "number"],
)
@pytest.mark.parametrize("training", [True, False])
def test_a_term_that_is_no_scalar_of_fp32_or_wider_is_told(term: Any, shown: str, training: bool) -> None:
    engine = PipelineEngine[Tensor]([lambda inputs, x: StageOutput({}, {LOSS: term})])
    steps = ProvedSchedules().prove([1], [1])
    with pytest.raises(MegaliteError, match=f"stage 0 .* not a scalar .* for micro-batch 0: lm_loss, {shown}"):
        engine.run(steps.training(1) if training else steps.evaluation(1), MICRO_BATCHES, FACTORS)


@pytest.mark.wide
def test_a_term_without_a_graph_is_recorded_alone() -> None:
    """Use a figure that a stage only counts, or a term of tensors that need no gradient."""
    stage = Stage()

    def counting(inputs: Mapping[str, Tensor], x: Tensor) -> StageOutput:
        return StageOutput({}, {LOSS: stage(None, x), "rows": torch.ones(())})

    sums = PipelineEngine([counting]).run(
        ProvedSchedules().prove([3]).training(3), MICRO_BATCHES, {**FACTORS, "rows": 1.0}
    )
    assert sums["rows"].item() == 3
    torch.testing.assert_close(stage.weight.grad, 2 * stage.weight.detach() * sum(x**2 for x in MICRO_BATCHES))


def test_a_tensor_without_a_graph_is_told() -> None:
    def cut_off(hidden: Tensor | None, x: Tensor) -> Tensor:
        return torch.ones(2, dtype=torch.float64)

    engine = PipelineEngine(
        [as_stage(cut_off, last=False), as_stage(Last(), last=True)], passing_hidden(ON_ONE_RANK, (2,)), device=CPU
    )
    steps = ProvedSchedules(ON_ONE_RANK, schedule="zb-v").prove([1], [1])
    assert engine.run(steps.evaluation(1), MICRO_BATCHES)
    with pytest.raises(MegaliteError, match="stage 0 returned hidden states without a graph for micro-batch 0, "):
        engine.run(steps.training(1), MICRO_BATCHES, FACTORS)


def test_sums_do_not_depend_on_the_order_of_stages() -> None:
    """To the last bit: a schedule decides which of a rank's stages comes next."""

    def first(inputs: Mapping[str, Tensor], x: Tensor) -> StageOutput:
        return StageOutput({HIDDEN: x}, {"size": torch.ones(())})

    def second(inputs: Mapping[str, Tensor], x: Tensor) -> StageOutput:
        return StageOutput({}, {"size": x[0]})

    engine = PipelineEngine([first, second], passing_hidden(ON_ONE_RANK, (2,)), device=CPU)
    one_by_one = [Action("F", number, chunk) for number in range(2) for chunk in range(2)]
    in_turn = sorted(one_by_one, key=lambda action: action.chunk)
    huge = torch.tensor([2.0**53, 0.0], dtype=torch.float64)
    found = [engine.run(actions, [huge, -huge])["size"].item() for actions in (one_by_one, in_turn)]
    assert found == [2.0, 2.0]


def test_a_tensor_that_is_not_passed_on_is_told() -> None:
    nothing = PipelineEngine([lambda inputs, x: StageOutput({})] * 2, passing_hidden(ON_ONE_RANK, (2,)), device=CPU)
    with pytest.raises(MegaliteError, match="stage 0 did not return hidden states for micro-batch 0"):
        nothing.run(ProvedSchedules(ON_ONE_RANK, schedule="zb-v").prove([1]).training(1), MICRO_BATCHES, FACTORS)


def test_an_engine_of_several_stages_needs_to_know_what_they_pass_on() -> None:
    with pytest.raises(ValueError, match="needs the shape and dtype of hidden_states"):
        PipelineEngine([as_stage(First(), last=False)], Stages(2), 0)


class Mailbox(Links):
    """Messages to a neighbour that does not exist; its answers are all ones."""

    def __init__(self) -> None:
        super().__init__({}, {})
        self.sent: list[Tensor] = []

    def send(self, tensor: Tensor, peer: int) -> Pending:
        self.sent.append(tensor)
        return completed(tensor)

    def receive(self, tensor: Tensor, peer: int) -> Pending:
        return completed(tensor.fill_(1.0))


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_a_message_may_be_waited_for_behind_its_own_backward(micro_batches: int, schedule: str) -> None:
    """So it is with one micro-batch, whose backward is the next computation: then its graph is gone."""
    first, links = First(), Mailbox()
    engine = PipelineEngine([as_stage(first, last=False)], passing_hidden(Stages(2), (2,)), 0, links, CPU)
    actions = ProvedSchedules(Stages(2), 0, schedule=schedule).prove([micro_batches]).training(micro_batches)
    engine.run(actions, MICRO_BATCHES, FACTORS)
    slope = 1 - torch.tanh(torch.ones(2, dtype=torch.float64)) ** 2
    torch.testing.assert_close(first.weight.grad, micro_batches * slope)
    assert len(links.sent) == micro_batches


@pytest.mark.wide
def test_a_recording_has_every_action_in_its_order() -> None:
    recording = Recording(CPU)
    actions = ProvedSchedules(reductions=Reductions()).prove([3]).training(3)
    engine_of(Stage()).run(actions, MICRO_BATCHES, FACTORS, Gradients(), recording)
    assert [span.action for span in recording.spans] == actions
    times = [time for span in recording.spans for time in (span.start, span.end)]
    assert times == sorted(times)


def test_a_recorded_action_begins_when_its_message_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time is counted here by what happens: the wait for the message is one tick, the action another."""
    ticks: list[str] = []
    monkeypatch.setattr(time, "perf_counter", lambda: float(len(ticks)))

    class Step:
        def wait_for_message(self, action: Action) -> None:
            ticks.append("message")

        def execute(self, action: Action) -> None:
            ticks.append("action")

    recording = Recording(CPU)
    (action,) = ProvedSchedules().prove([], [1]).evaluation(1)
    recording.execute(action, Step())
    assert [(span.start, span.end) for span in recording.spans] == [(1.0, 2.0)]


@pytest.mark.parametrize("order", [1, -1])
def test_what_ranks_do_together_behind_their_lists_is_part_of_the_proof(order: int) -> None:
    both = [Collective("norm", (0, 1)), Collective("gather", (0, 1))]
    steps = ProvedSchedules(Stages(2), 0, after_list=[both, both[::order]])
    if order == 1:
        assert steps.prove([2]).training(2)
    else:
        with pytest.raises(ScheduleError):
            steps.prove([2])
