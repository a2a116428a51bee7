"""Steps of torch's optimizers are not accused, whatever saved them; of wrong ones, the cause comes first."""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.atomic_files import write_atomically
from megalite.checkpoint.file_writer import write_files
from megalite.checkpoint.formats import FORMATS
from megalite.checkpoint.manifest import read_manifest
from megalite.checkpoint.tensors import Kind, Source
from megalite.conversion.mapping import ToFiles
from megalite.conversion.megatron import tensors_of_megatron
from megalite.conversion.megatron_arguments import arguments_of
from megalite.conversion.megatron_names import written
from megalite.conversion.opened import logical_tensors
from megalite.errors import CheckpointError
from megalite.extras.verify.saved import Saved, open_saved
from megalite.extras.verify.step_check import StepCheck, check_step, gradients_of
from megalite.extras.verify.step_quantities import COPIES, WEIGHTS, StepGradients
from megalite.extras.verify.update_rules import AVERAGE, SQUARES
from megalite.parallel.sharding import Box
from tests.extras.verify.recorded_run import FLAGS, command_of, saved, train
from tests.harness import checkpoints

pytestmark = pytest.mark.extra

BF16 = f"{FLAGS} --bf16"
RATE, EPSILON, DECAY, CLIP = 0.005, 1e-8, 0.1, 0.5
"""Rate of the second step, in the middle of the warm-up to 0.01."""
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("run") / "run", BF16)


def tensors_at(run: Path, step: int) -> Tensors:
    return checkpoints.read(run / f"iter_{step:07d}")


def with_tensors(run: Path, step: int, tensors: Tensors, folder: Path) -> Saved:
    """Save tensors as those of a step of the run."""
    manifest = read_manifest(run / f"iter_{step:07d}")
    return open_saved(checkpoints.write(folder, tensors, training=manifest.training, config=manifest.config))


def random_gradients(run: Path, scale: float = 0.2) -> Tensors:
    """Return gradients that are clipped: some elements are tiny, where epsilon shows."""
    generator = torch.Generator().manual_seed(0)
    kinds = saved(run, 0).weights.source.tensors

    def draw(kind: Kind) -> Tensor:
        sizes = 10 ** torch.empty(kind.shape, dtype=torch.float64).uniform_(-6, 0, generator=generator)
        return scale * sizes * torch.randn(kind.shape, dtype=torch.float64, generator=generator)

    return {name: draw(kind) for name, kind in kinds.items()}


def names_in(tensors: Tensors) -> list[str]:
    return [name.removeprefix("model/") for name in tensors if name.startswith("model/")]


def stepped(
    tensors: Tensors,
    gradients: Tensors,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    *,
    step: int = 2,
    decays: Callable[[str], bool] = lambda name: "norm" not in name,
    clip: float | None = None,
    masters: bool = True,
    **options: Any,
) -> Tensors:
    """Return the tensors after a step of an optimizer of torch. `clip`: factor of gradients; None: by their norm."""
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    factor = min(1.0, CLIP / (float(norm) + 1e-6)) if clip is None else clip
    settings: dict[str, Any] = {"lr": RATE, "weight_decay": DECAY, "betas": (0.9, 0.999), "eps": EPSILON} | options
    found = dict(tensors)
    for name in names_in(tensors):
        weights = tensors[f"optimizer/master/{name}" if masters else f"model/{name}"].clone().requires_grad_()
        own = settings if decays(name) else settings | {"weight_decay": 0.0}
        rule = optimizer([weights], foreach=False, **own)  # type: ignore[call-arg]
        rule.state[weights] = {
            "step": torch.tensor(float(step - 1)),
            **{kind: tensors[f"optimizer/{kind}/{name}"].to(weights.dtype).clone() for kind in (AVERAGE, SQUARES)},
        }
        weights.grad = (gradients[name] * factor).to(weights.dtype)
        rule.step()
        after = weights.detach()
        found |= {f"optimizer/{kind}/{name}": rule.state[weights][kind].float() for kind in (AVERAGE, SQUARES)}
        found |= {f"optimizer/master/{name}": after.float(), f"model/{name}": after.bfloat16()}
    return found


def check(
    run: Path, after: Tensors, gradients: Tensors | None, folder: Path, flags: str = BF16, ranks: int = 1
) -> StepCheck:
    """Check a step from the first checkpoint of the run, which has a step behind it, to the given tensors."""
    given = None if gradients is None else StepGradients(gradients)
    return check_step(command_of(flags, ranks), saved(run, 1), with_tensors(run, 2, after, folder), given)


# ------------------------------------------------------------------------------------------------ right steps


@pytest.mark.parametrize(
    "flags",
    [
        FLAGS,
        f"{BF16} --optimizer muon --muon-momentum 0.95 --muon-nesterov",
        f"{BF16} --optimizer sgd --decoupled-lr 0.02",
        f"{FLAGS} --fp64",
        f"{BF16} --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --adam-beta2 0.95",
        f"{BF16} --num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type none --ckpt-format torch_dist",
    ],
)
def test_right_steps_of_megalite_are_not_accused(tmp_path: Path, flags: str) -> None:
    folder = train(tmp_path / "run", flags, steps=2)
    command = command_of(flags)
    for step in range(2):
        before, after = saved(folder, step), saved(folder, step + 1)
        for gradients in (None, gradients_of(command, before)):
            found = check_step(command, before, after, gradients)
            assert found.first is None, found.first
            assert {each.tensor for each in found.differences} == {*before.weights.source.tensors}


def test_a_right_step_of_torch_is_not_accused(run: Path, tmp_path: Path) -> None:
    gradients = random_gradients(run)
    after = stepped(tensors_at(run, 1), gradients)
    found = check(run, after, gradients, tmp_path / "with")
    assert found.first is None, found.first
    assert {each.kind for each in found.differences} == {AVERAGE, SQUARES, WEIGHTS, COPIES}
    assert check(run, after, None, tmp_path / "without").first is None


# ------------------------------------------------------------------------------------------------ wrong steps

STEPS: dict[str, tuple[str, dict[str, Any]]] = {
    "epsilon": ("epsilon is 1e-05, not 1e-08", {"eps": 1e-5}),
    "no decay": ("no weights decay", {"weight_decay": 0.0}),
    "norms decay": ("norms and biases decay, too", {"decays": lambda name: True}),
    "embedding": (
        "the embedding and the output layer do not decay",
        {"decays": lambda name: "norm" not in name and name not in ("embedding.word", "output")},
    ),
    "L2": ("weight decay is a term of the gradient (L2)", {"optimizer": torch.optim.Adam}),
    "decay by the rate": ("weight decay is multiplied by the learning rate twice", {"weight_decay": DECAY * RATE}),
    "decay alone": ("weight decay is not multiplied by the learning rate", {"weight_decay": DECAY / RATE}),
    "betas": ("the betas are 0.9 and 0.95", {"betas": (0.9, 0.95)}),
    "swapped": ("the betas are 0.999 and 0.9", {"betas": (0.999, 0.9)}),
    "step": ("the step of the bias correction is one too high", {"step": 3}),
    "no clip": ("gradients are not clipped", {"clip": 1.0}),
    "rate of 0": ("weights were not updated", {"lr": 0.0}),
    "rate after": ("the learning rate is that of the step after", {"lr": 0.01}),
    "no masters": ("weights and averages are in bf16, without master weights", {"masters": False}),
}


@pytest.mark.parametrize("case", STEPS)
def test_wrong_steps_are_explained(run: Path, tmp_path: Path, case: str) -> None:
    """The hypothesis that comes first explains it, and is what was done."""
    expected, options = STEPS[case]
    gradients = random_gradients(run)
    found = check(run, stepped(tensors_at(run, 1), gradients, **options), gradients, tmp_path / "after")
    assert found.first is not None
    best = found.explanations[0]
    assert best.explains
    assert best.name == expected


@pytest.mark.parametrize("case", ["epsilon", "norms decay", "decay alone", "step", "rate after", "no masters"])
def test_averages_alone_tell_what_is_wrong(run: Path, tmp_path: Path, case: str) -> None:
    """Without any gradients, weights still follow from the averages that were saved."""
    expected, options = STEPS[case]
    after = stepped(tensors_at(run, 1), random_gradients(run), **options)
    found = check(run, after, None, tmp_path / "after")
    assert found.first is not None
    assert found.first.kind in (WEIGHTS, SQUARES)
    assert found.explanations[0].name == expected


@pytest.mark.parametrize(
    ("factor", "expected"),
    [(2.0, "gradients are times 2 (the tensor-parallel ranks"), (0.25, "divided by 4 (the micro-batches of a step")],
)
def test_factors_of_gradients_are_named(run: Path, tmp_path: Path, factor: float, expected: str) -> None:
    gradients = random_gradients(run, scale=1e-4)  # too small to be clipped, which would take the factor away
    wrong = {name: factor * gradient for name, gradient in gradients.items()}
    flags, ranks = f"{BF16} --tensor-model-parallel-size 2 --sequence-parallel", 4
    found = check(run, stepped(tensors_at(run, 1), wrong), gradients, tmp_path / "after", flags, ranks)
    assert found.first is not None
    assert found.first.kind == AVERAGE
    assert expected in found.explanations[0].name
    assert found.explanations[0].explains


def test_a_tensor_beside_another_norm_is_named(run: Path, tmp_path: Path) -> None:
    """A gradient that is doubled makes the norm larger, so that all others are clipped more, too."""
    gradients = random_gradients(run)
    doubled = gradients | {"layers.0.mlp.down": 2 * gradients["layers.0.mlp.down"]}
    found = check(run, stepped(tensors_at(run, 1), doubled), gradients, tmp_path / "after")
    norm = sum(float(each.square().sum()) for each in doubled.values()) ** 0.5
    assert found.first is not None
    assert f"they are clipped by a norm of {norm:.6g}" in found.explanations[0].name
    assert [(each.tensor, each.kind) for each in found.left] == [("layers.0.mlp.down", AVERAGE)]
    assert found.left[0].factor == pytest.approx(2.0, rel=1e-6)


def test_a_norm_that_counts_replicas_clips_otherwise(run: Path, tmp_path: Path) -> None:
    gradients = random_gradients(run)
    squares = sum(float(each.square().sum()) * (2 if "norm" in name else 1) for name, each in gradients.items())
    after = stepped(tensors_at(run, 1), gradients, clip=CLIP / (squares**0.5 + 1e-6))
    flags, ranks = f"{BF16} --tensor-model-parallel-size 2 --sequence-parallel", 2
    found = check(run, after, gradients, tmp_path / "after", flags, ranks)
    assert found.first is not None
    assert "counts replicas on each tensor-parallel rank" in found.explanations[0].name


def changed(tensors: Tensors, names: Iterable[str], change: Callable[[str], Tensor]) -> Tensors:
    return tensors | {name: change(name) for name in names}


def test_stale_weights_are_recognized(run: Path, tmp_path: Path) -> None:
    """One matrix stays as it was, with its averages and its copy."""
    before, gradients = tensors_at(run, 1), random_gradients(run)
    stale = [name for name in before if name.endswith("layers.1.mlp.down")]
    after = changed(stepped(before, gradients), stale, before.__getitem__)
    found = check(run, after, gradients, tmp_path / "after")
    assert found.first is not None
    assert found.first.tensor == "layers.1.mlp.down"
    assert {each.tensor for each in found.differences if each.is_accused} == {"layers.1.mlp.down"}
    assert found.explanations[0].name == "neither weights nor averages were updated"


def test_averages_that_began_anew_are_recognized(run: Path, tmp_path: Path) -> None:
    before, gradients = tensors_at(run, 1), random_gradients(run)
    averages = [name for name in before if name.startswith(("optimizer/exp_avg/", "optimizer/exp_avg_sq/"))]
    anew = changed(before, averages, lambda name: torch.zeros_like(before[name]))
    found = check(run, stepped(anew, gradients, step=1), gradients, tmp_path / "after")
    assert found.explanations[0].name == "averages began at zero, and their step at 1"


def test_averages_in_bf16_are_recognized(run: Path, tmp_path: Path) -> None:
    gradients = random_gradients(run)
    after = stepped(tensors_at(run, 1), gradients)
    averages = [name for name in after if name.startswith("optimizer/exp_avg")]
    found = check(
        run, changed(after, averages, lambda name: after[name].bfloat16().float()), gradients, tmp_path / "after"
    )
    assert found.explanations[0].name == "averages are kept in bf16"


@pytest.mark.parametrize("case", ["of the masters before", "truncated"])
def test_copies_must_be_the_rounded_masters(run: Path, tmp_path: Path, case: str) -> None:
    before, gradients = tensors_at(run, 1), random_gradients(run)
    after = stepped(before, gradients)
    copies = [name for name in after if name.startswith("model/")]

    def copy(name: str) -> Tensor:
        if case == "of the masters before":
            return before[name]
        bits = after[name.replace("model/", "optimizer/master/")].view(torch.int32) & ~0xFFFF
        return bits.view(torch.float32).bfloat16()

    found = check(run, changed(after, copies, copy), gradients, tmp_path / "after")
    assert found.first is not None
    assert found.first.kind == COPIES
    words = {"of the masters before": "those of the master weights before the step", "truncated": "truncated"}[case]
    assert words in found.explanations[0].name


# ------------------------------------------------------------------------------------------------ weights alone


def weights_only(saved: Saved) -> Saved:
    return replace(saved, states={}, updates=saved.updates)


def test_weights_of_the_first_step_are_computed(run: Path, tmp_path: Path) -> None:
    """Its averages begin at zero, so that the gradients tell all. bf16 has room for a step of 0.01 here."""
    flags = BF16.replace("--lr-warmup-iters 2", "--lr-warmup-iters 0")
    folder = train(tmp_path / "run", flags, steps=1)
    command, before, after = command_of(flags), weights_only(saved(folder, 0)), weights_only(saved(folder, 1))
    gradients = gradients_of(command, before)
    assert check_step(command, before, after, gradients).first is None
    exact, *rounded = (
        {name: -gradient for name, gradient in each.items()} for each in (gradients.exact, *gradients.rounded)
    )
    found = check_step(command, before, after, StepGradients(exact, rounded))
    assert found.first is not None
    assert found.explanations[0].name == "gradients have the other sign"


def test_later_weights_alone_have_bounds(run: Path, tmp_path: Path) -> None:
    command, before = command_of(BF16), weights_only(saved(run, 1))
    assert check_step(command, before, weights_only(saved(run, 2))).first is None
    tensors = tensors_at(run, 2)
    far = changed(tensors, ["model/layers.0.mlp.down"], lambda name: tensors[name] + 0.1)
    found = check_step(command, before, weights_only(with_tensors(run, 2, far, tmp_path / "far")))
    assert found.first is not None
    assert found.first.tensor == "layers.0.mlp.down"


# ------------------------------------------------------------------------------------------------ other checkpoints


class _Named:
    """Tensors of several sources, each under a prefix (a `Source`)."""

    def __init__(self, sources: dict[str, Source]) -> None:
        self._places = {prefix + name: (each, name) for prefix, each in sources.items() for name in each.tensors}
        self.tensors = {name: source.tensors[own] for name, (source, own) in self._places.items()}

    def fill(self, name: str, box: Box, values: Tensor) -> None:
        source, own = self._places[name]
        source.fill(own, box, values)


def megatron(saved: Saved, folder: Path, *, states: bool = True) -> Saved:
    """Save a checkpoint as Megatron-LM's torch_dist with its optimizer's state by parameter."""
    model = saved.weights.config
    mapping = tensors_of_megatron(model, logical_tensors(model))
    named = [replace(tensor, name=written(tensor.name, model)) for tensor in mapping]
    megatrons = {"master": "fp32_param", AVERAGE: AVERAGE, SQUARES: SQUARES}
    sources: dict[str, Source] = {"": ToFiles(saved.weights.source, named)}
    for ours, theirs in megatrons.items() if states else ():
        sources[f"optimizer.state.{theirs}."] = ToFiles(saved.states[ours], named)
    source = _Named(sources)
    arguments: argparse.Namespace = arguments_of(model, saved.weights.data, 16, model.vocab_size or 0)
    arguments.consumed_train_samples = saved.consumed_samples
    common = {"args": arguments, "checkpoint_version": 3.0, "iteration": saved.iteration}
    common["optimizer"] = {"optimizer": {"param_groups": [{"step": saved.updates, "lr": 0.1}]}, "grad_scaler": {}}
    stream = io.BytesIO()
    torch.save(common, stream)
    folder.mkdir()
    cut = [[(name, kind.whole) for name, kind in source.tensors.items()]]
    write_files(source, folder, cut, FORMATS["torch_dist"], 1, lambda size: None)
    write_atomically(folder / "common.pt", stream.getvalue())
    write_atomically(folder / "metadata.json", b'{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    return open_saved(folder)


def test_checkpoints_of_megatron_have_the_state(run: Path, tmp_path: Path) -> None:
    command = command_of(BF16, program="megatron")
    before, after = (megatron(saved(run, step), tmp_path / f"{step}") for step in (1, 2))
    assert (before.iteration, before.consumed_samples, before.updates) == (1, 8, 1)
    assert before.states.keys() == {"master", AVERAGE, SQUARES}
    assert check_step(command, before, after, gradients_of(command, before)).first is None
    gradients = random_gradients(run)
    wrong = with_tensors(run, 2, stepped(tensors_at(run, 1), gradients, eps=1e-5), tmp_path / "wrong")
    found = check_step(command, before, megatron(wrong, tmp_path / "of wrong"), StepGradients(gradients))
    assert found.explanations[0].name == "epsilon is 1e-05, not 1e-08"


def test_state_that_is_not_saved_by_parameter_is_said(run: Path, tmp_path: Path) -> None:
    found = megatron(saved(run, 1), tmp_path / "one", states=False)
    assert not found.states
    assert any("--dist-ckpt-optim-fully-reshardable" in note for note in found.notes)


def test_checkpoints_must_be_a_step_apart_and_of_one_network(run: Path, tmp_path: Path) -> None:
    command = command_of(BF16)
    with pytest.raises(CheckpointError, match="at step 3, not at the step after 1"):
        check_step(command, saved(run, 1), saved(run, 3))
    other = train(tmp_path / "other", BF16.replace("--ffn-hidden-size 24", "--ffn-hidden-size 32"), steps=1)
    with pytest.raises(CheckpointError, match=r"they differ in layers\.0\.mlp"):
        check_step(command, saved(run, 0), saved(other, 1))


def test_muon_is_recognized_by_its_constants(tmp_path: Path) -> None:
    """The run multiplies matrices in bf16, and the truth in fp64."""
    flags = f"{BF16} --optimizer muon --muon-momentum 0.95 --muon-nesterov --muon-extra-scale-factor 0.2"
    folder = train(tmp_path / "run", flags, steps=2)
    before, after = saved(folder, 1), saved(folder, 2)
    gradients = gradients_of(command_of(flags), before)
    for said, expected in (
        (flags.replace(" --muon-nesterov", ""), "Nesterov's momentum is used"),
        (flags.replace(" 0.2", " 0.4"), "the extra scale factor is 0.2"),
        (f"{flags} --muon-scale-mode unit_rms_norm", "updates are scaled as by spectral"),
    ):
        found = check_step(command_of(said), before, after, gradients)
        assert found.first is not None
        assert found.explanations[0].name == expected
