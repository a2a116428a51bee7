"""Calls of plain modules, the messages between them, and the errors about both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.errors import MegaliteError
from megalite.modules.batch_norm import SyncBatchNorm
from megalite.modules.calling import arguments, results
from megalite.modules.messages import StagePlan, copies_on_meta, find_messages
from megalite.modules.records import give_records
from megalite.modules.stage import ModuleStage, Objective
from megalite.parallel.mesh import Group, ParallelMesh
from megalite.parallel.stage import StageOutput, TensorSpec
from megalite.parallel.stage_module import Inside
from tests.unit.test_modules_training import Batch, Run, assert_same_state, cut


class Residual(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(width, out, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(out)
        self.second, self.short = nn.Conv2d(out, out, 3, padding=1), nn.Conv2d(width, out, 1, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.second(F.relu(self.norm(self.first(x))))
        return F.relu(inner + self.short(x))


def test_messages_of_a_network_for_images_have_its_widths() -> None:
    stages = [
        nn.Sequential(nn.Conv2d(3, 64, 7, stride=2, padding=3), nn.MaxPool2d(2), Residual(64, 128)),
        Residual(128, 256),
        nn.Sequential(Residual(256, 512), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)),
    ]
    values = {"input": torch.randn(2, 3, 64, 64, dtype=torch.bfloat16)}
    plans = find_messages([stage.to(torch.bfloat16) for stage in stages], values)
    assert [plan.passes for plan in plans] == [
        (TensorSpec("hidden", (2, 128, 8, 8), torch.bfloat16),),
        (TensorSpec("hidden", (2, 256, 4, 4), torch.bfloat16),),
        (),
    ]
    assert [plan.blocks for plan in plans] == [("0", "2"), ("first", "norm", "second", "short"), ("0", "3")]
    assert [part.device.type for part in stages[0].parameters()] == ["cpu"] * 9  # the originals are as before


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(20, 8), nn.Linear(8, 8)

    def forward(self, source: Tensor) -> dict[str, Tensor]:
        return {"memory": self.layer(self.embed(source)).tanh(), "length": (source > 0).sum(1)}


class DecoderBegin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)

    def forward(self, target: Tensor) -> dict[str, Tensor]:
        return {"state": self.embed(target)}


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, state: Tensor, memory: Tensor, *, length: Tensor) -> dict[str, Tensor]:
        scores = self.query(state) @ memory.mT
        hidden = torch.arange(memory.shape[1], device=memory.device) >= length[:, None]
        attention = scores.masked_fill(hidden[:, None], -1e9).softmax(-1)
        return {"state": state + self.out(attention @ memory).tanh()}


def translation(step: int, number: int) -> Batch:
    generator = torch.Generator().manual_seed(10 * step + number)
    source = torch.randint(1, 20, (4, 6), generator=generator)
    source[0, 4:] = 0
    return Batch({"source": source, "target": torch.randint(20, (4, 5), generator=generator)}, range(4))


def encoder_and_decoder() -> list[nn.Module]:
    torch.manual_seed(1)
    return [layer.double() for layer in (Encoder(), DecoderBegin(), Decoder(), Decoder())]


class Named(nn.Module):
    """Stage whose module has its number as a name."""

    def __init__(self, number: int, module: nn.Module) -> None:
        super().__init__()
        self.add_module(str(number), module)
        self.forward = module.forward


def test_tensors_that_only_later_stages_need_are_passed_through_with_their_gradients() -> None:
    def loss(output: Mapping[str, Tensor], values: Any) -> Tensor:
        return output["state"].pow(3).sum()

    memory, length = TensorSpec("memory", (4, 6, 8), torch.float64), TensorSpec("length", (4,), torch.int64, False)
    state = TensorSpec("state", (4, 5, 8), torch.float64)
    plans = find_messages(encoder_and_decoder(), translation(0, 0).values)
    assert [set(plan.passes) for plan in plans] == [
        {memory, length},
        {state, memory, length},
        {state, memory, length},
        set(),
    ]

    expected = encoder_and_decoder()
    parameters = [parameter for stage in expected for parameter in stage.parameters()]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=0.01,
    )
    run = Run(
        [Named(number, stage) for number, stage in enumerate(encoder_and_decoder())], translation(0, 0).values, loss
    )
    for step in range(2):
        run.step([translation(step, number) for number in range(2)])
        optimizer.zero_grad()
        for number in range(2):
            values = translation(step, number).values
            encoded = expected[0](values["source"])
            tensors = expected[1](values["target"])
            for decoder in expected[2:]:
                tensors = decoder(tensors["state"], **encoded)
            (loss(tensors, values) / 8).backward()
        optimizer.step()
    assert_same_state(run.modules, nn.ModuleList(expected))


class Takes(nn.Module):
    def forward(self, a: Tensor, b: Tensor, c: int = 3, *, d: Tensor | None = None) -> Tensor:
        return a


class TakesRest(nn.Module):
    def forward(self, a: Tensor, *rest: Tensor, **named: Tensor) -> Tensor:
        return a


ONE, TWO, THREE = torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0)
CALLS: dict[str, tuple[int, nn.Module, dict[str, Tensor], Any, list[Any], dict[str, Any]]] = {
    "fields by name": (0, Takes(), {}, {"b": TWO, "a": ONE, "label": THREE}, [ONE, TWO], {}),
    "a field behind one that is missing": (0, Takes(), {}, {"b": TWO, "a": ONE, "d": THREE}, [ONE, TWO], {"d": THREE}),
    "the result, and a field": (1, Takes(), {"hidden": ONE}, {"b": TWO}, [ONE, TWO], {}),
    "the result behind a field": (1, Takes(), {"hidden": TWO}, {"a": ONE}, [ONE, TWO], {}),
    "two results": (1, Takes(), {"output_0": ONE, "output_1": TWO}, {}, [ONE, TWO], {}),
    "a result instead of a field": (1, nn.Sequential(), {"hidden": ONE}, {"input": TWO}, [ONE], {}),
    "a tensor before a field": (1, Takes(), {"a": ONE, "b": TWO}, {"a": THREE}, [ONE, TWO], {}),
    "a tuple": (0, nn.Sequential(), {}, (ONE, TWO), [ONE], {}),
    "a tuple in a later stage": (1, nn.Sequential(), {"hidden": TWO}, (ONE, TWO), [TWO], {}),
    "a tensor": (0, nn.Sequential(), {}, ONE, [ONE], {}),
    "any": (1, TakesRest(), {"output_0": ONE, "output_1": TWO, "x": THREE}, {}, [ONE, TWO], {"x": THREE}),
}


@pytest.mark.parametrize("case", CALLS)
def test_arguments_come_by_name_and_then_by_position(case: str) -> None:
    number, module, inputs, values, by_position, by_name = CALLS[case]
    found_by_position, found_by_name, _ = arguments(number, module, inputs, values)
    assert list(map(id, found_by_position)) == list(map(id, by_position))
    assert {name: id(value) for name, value in found_by_name.items()} == {n: id(v) for n, v in by_name.items()}


@pytest.mark.parametrize(
    ("number", "module", "inputs", "values", "message"),
    [
        (
            0,
            Takes(),
            {},
            {"image": ONE, "b": TWO},
            r"stage 0 \(Takes\) needs a\. It takes a, b, c, d; the batch has image, b\.",
        ),
        (1, Takes(), {"memory": ONE}, ONE, r"needs a, b\. .* no named fields; the stages before it give memory\. Give"),
        (2, nn.ReLU(), {"output_0": ONE, "output_1": TWO}, {}, r"stage 2 \(ReLU\) has no argument left for output_1"),
    ],
)
def test_a_stage_that_cannot_take_what_there_is_is_told_both_sides(
    number: int, module: nn.Module, inputs: dict[str, Tensor], values: Any, message: str
) -> None:
    with pytest.raises(MegaliteError, match=message):
        arguments(number, module, inputs, values)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (3.0, r"stage 1 \(ReLU\) returned float: let it return a tensor"),
        ({"a": ONE, "b": None}, "returned NoneType as b, which is no tensor"),
        ((ONE, "text"), "returned str as output_1"),
    ],
)
def test_results_that_are_no_tensors_are_refused(output: Any, message: str) -> None:
    with pytest.raises(MegaliteError, match=message):
        results(1, nn.ReLU(), output)


class DependsOnData(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return input * input.sum().item()


def test_a_module_that_needs_values_needs_declared_messages() -> None:
    modules = [DependsOnData(), nn.Linear(3, 3)]
    with pytest.raises(
        MegaliteError, match=r"stage 0 \(DependsOnData\) failed on the meta device.*declare the messages"
    ):
        find_messages(modules, torch.ones(2, 3))
    declared = (TensorSpec("hidden", (2, 3), torch.float32, gradient=False),)
    assert find_messages(modules, torch.ones(2, 3), [declared]) == [StagePlan(declared), StagePlan()]


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ([], "0 messages are declared for the borders of 2 stages"),
        ([(TensorSpec("hidden"),)], "the message hidden is declared without its shape or dtype"),
        (
            [(TensorSpec("ids", (2,), torch.int64),)],
            "the message ids of torch.int64 can have no gradient: set gradient",
        ),
    ],
)
def test_declared_messages_are_checked(declared: Any, message: str) -> None:
    with pytest.raises(MegaliteError, match=message):
        find_messages([nn.ReLU(), nn.ReLU()], None, declared)


def test_a_gradient_goes_back_only_to_what_needs_one() -> None:
    frozen = nn.Linear(3, 3).requires_grad_(False)
    plans = find_messages([frozen, nn.Linear(3, 3)], torch.ones(2, 3))
    assert plans[0].passes == (TensorSpec("hidden", (2, 3), torch.float32, gradient=False),)


class Shared(nn.Module):
    """Module that uses the weight of one part behind another."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.second, self.way = nn.Linear(3, 3), nn.Linear(3, 3), way

    def forward(self, input: Tensor) -> Tensor:
        if self.way == "order":
            return self.first(self.second(input))
        if self.way == "twice":
            return self.second(self.first(self.first(input)))
        hidden: Tensor = self.second(self.first(input))
        return {
            "weight": lambda: F.linear(hidden, self.first.weight),
            "shape": lambda: hidden * self.first.weight.numel(),
        }[self.way]()


@pytest.mark.parametrize(
    ("way", "blocks"), [("order", ()), ("twice", ()), ("weight", ()), ("shape", ("first", "second"))]
)
def test_blocks_are_parts_that_run_in_order_and_keep_their_weights_to_themselves(
    way: str, blocks: tuple[str, ...]
) -> None:
    (plan,) = find_messages([Shared(way)], torch.ones(2, 3))
    assert plan.blocks == blocks


def test_copies_on_meta_know_ties_and_have_the_same_groups() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    norm = SyncBatchNorm(3)
    norm.group = Group((4, 5), 1)
    made = copies_on_meta([first, second, norm])
    assert made[0].weight is made[1].weight
    assert made[0].weight.is_meta
    assert made[2].group is norm.group


def one_stage(module: nn.Module, **options: Any) -> ModuleStage:
    mesh = ParallelMesh()
    plans = find_messages([module], options.pop("values", torch.ones(2, 3)))
    give_records([module], mesh)
    return ModuleStage(module, mesh, plans[0], **options)


def test_the_last_stage_returns_sums_and_in_evaluation_metrics() -> None:
    stage = one_stage(
        nn.Identity(),
        objective=Objective(
            lambda output, values: {"a": output.sum(), "b": output.bfloat16().sum()},
            metric=lambda output, values: {"most": output.max()},
        ),
    )
    batch = Batch(torch.ones(2, 3), range(2))
    terms = stage({}, batch).terms
    assert {name: (value.item(), value.dtype) for name, value in terms.items()} == {
        "a": (6.0, torch.float32),
        "b": (6.0, torch.float32),
    }
    assert set(stage.eval()({}, batch).terms) == {"a", "b", "most", "items of most"}
    assert stage.loss_terms[0].count(batch).item() == 2


def test_without_a_loss_a_stage_returns_its_outputs() -> None:
    batch = Batch(torch.ones(2, 3), range(2))
    assert set(one_stage(nn.Identity())({}, batch).tensors) == {"hidden"}


class OwnTerm(nn.Module):
    def forward(self, input: Tensor) -> StageOutput:
        return StageOutput({"x": 2 * input}, {"extra": input.sum()})


def test_a_stage_may_return_terms_of_its_own() -> None:
    batch = Batch(torch.ones(2, 3), range(2))
    stage = one_stage(OwnTerm(), objective=Objective(lambda output, values: output["x"].sum()))
    assert {name: value.item() for name, value in stage({}, batch).terms.items()} == {"extra": 6.0, "loss": 12.0}


@pytest.mark.parametrize(("value", "shown"), [(torch.ones(2), r"a tensor \(2,\)"), (3.0, "float")])
def test_a_loss_that_is_no_scalar_is_refused(value: Any, shown: str) -> None:
    stage = one_stage(nn.Identity(), objective=Objective(lambda output, values: {"cross_entropy": value}))
    with pytest.raises(
        MegaliteError, match=rf"the loss of stage 0 \(Identity\) returned {shown} as cross_entropy: return"
    ):
        stage({}, Batch(torch.ones(2, 3), range(2)))


def test_a_tensor_that_a_later_stage_misses_is_named() -> None:
    plan = StagePlan((TensorSpec("memory", (2, 3), torch.float32),))
    stage = ModuleStage(nn.Identity(), ParallelMesh(), plan, count=2)
    with pytest.raises(
        MegaliteError, match=r"stage 0 \(Identity\) did not return memory, which a later stage takes: it"
    ):
        stage({}, Batch(torch.ones(2, 3), range(2)))


def test_random_numbers_depend_on_the_samples_and_are_restored() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    dropping = one_stage(nn.Dropout(), seed=1)
    ones = torch.ones(100, 3)

    def dropped(sample: int) -> Tensor:
        return dropping({}, Batch(ones, [sample])).tensors["hidden"]

    first = dropped(7)
    torch.rand(3)
    assert torch.equal(dropped(7), first)
    assert not torch.equal(dropped(8), first)
    other = one_stage(nn.Dropout(), seed=2)
    assert not torch.equal(other({}, Batch(ones, [7])).tensors["hidden"], first)
    torch.set_rng_state(before)
    dropped(7)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_pattern_that_recomputes_nothing_is_refused() -> None:
    module = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(
        MegaliteError, match=r"no submodule of stage 0 \(Sequential\) is called layer\*, to be recomputed: it has 0"
    ):
        one_stage(module, recompute=["layer*"])


class OfTwo(SyncBatchNorm):
    def bind(self, mesh: ParallelMesh) -> None:
        self.group = Group((0, 1), 0)


def test_collectives_of_recomputed_parts_are_listed_twice() -> None:
    def norms() -> list[SyncBatchNorm]:
        return [OfTwo(3), OfTwo(3)]

    each = Inside("batch statistics", "dp x cp")
    assert one_stage(nn.Sequential(*norms())).inside(backward=False) == [each] * 2
    assert one_stage(nn.Sequential(*norms())).inside(backward=True) == [each] * 2
    assert one_stage(nn.Sequential(*norms()), recompute=["1"]).inside(backward=True) == [each] * 3
    assert one_stage(nn.Sequential(nn.BatchNorm1d(3))).inside(backward=True) == []


def test_recomputed_dropout_drops_the_same() -> None:
    def gradient(recompute: bool) -> Tensor:
        torch.manual_seed(1)
        module = nn.Sequential(nn.Linear(3, 30), nn.Dropout(), nn.Linear(30, 1))
        stage = one_stage(
            module, recompute=recompute, objective=Objective(lambda output, values: output.square().sum())
        )
        stage({}, Batch(torch.ones(2, 3), [4])).terms["loss"].backward()
        found = module.get_parameter("0.weight").grad
        assert found is not None
        return found

    torch.testing.assert_close(gradient(True), gradient(False))


class Whole(nn.Module):
    """Module that is one part, so that all of it is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, image: Tensor) -> Tensor:
        return (image * self.weight).exp()


def test_a_whole_stage_that_is_recomputed_gets_its_arguments_by_name() -> None:
    values = {"image": torch.ones(2, 3)}
    stage = one_stage(Whole(), recompute=True, values=values, objective=Objective(lambda output, values: output.sum()))
    stage({}, Batch(values, range(2))).terms["loss"].backward()
    assert stage.module.weight.grad is not None


class Dropping(nn.Module):
    """Module that uses one part twice."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout()

    def forward(self, input: Tensor) -> Tensor:
        return torch.cat((self.dropout(input), self.dropout(input)))


def test_the_same_layers_drop_the_same_in_other_stages() -> None:
    ones = torch.ones(5, 30)

    def run(*stages: nn.Module) -> Tensor:
        hidden: dict[str, Tensor] = {}
        for number, module in enumerate(stages):
            plan = StagePlan((TensorSpec("hidden"),) if number < len(stages) - 1 else ())
            stage = ModuleStage(module, ParallelMesh(), plan, number=number, count=len(stages), seed=3)
            hidden = dict(stage(hidden, Batch(ones, [4])).tensors)
        return hidden["hidden"]

    def layers() -> list[nn.Module]:
        return [nn.Dropout(), Dropping(), nn.Sequential(nn.Dropout(0.2), nn.Dropout(0.1))]

    expected = run(*cut(layers(), [range(3)]))
    for parts in ([range(1), range(1, 3)], [range(2), range(2, 3)], [range(1), range(1, 2), range(2, 3)]):
        assert torch.equal(run(*cut(layers(), parts)), expected)
    first, second = run(Dropping()).chunk(2)
    assert not torch.equal(first, second)
