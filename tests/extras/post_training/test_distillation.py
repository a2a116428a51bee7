"""Training with a teacher, on layouts that split both networks."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalite.config import DataConfig
from megalite.config.distillation import DistillationConfig
from megalite.data.tokenizers import Tokenizer, build_tokenizer
from megalite.errors import ConfigurationError
from megalite.extras.post_training.distillation import DISTILL_LOSS, check_teacher
from megalite.extras.post_training.export import export_weights
from tests.distributed import layout_cell
from tests.distributed.layout_cell import VOCABULARIES, Cell, batch, network, oracle
from tests.distributed.layout_expected import assemble, on_ranks, one_thread
from tests.distributed.layout_run import SEED
from tests.distributed.post_training_run import Policy, exported
from tests.extras.post_training.distillation_run import Distilled, configuration, distilled_steps
from tests.harness.close import assert_gradient_close
from tests.harness.rank_pool import RankPools
from tests.oracle import loss_sum_and_count

WHOLE = DistillationConfig(distill_weight=0.3, distill_temperature=2.0)
FEW = DistillationConfig(distill_weight=0.6, distill_temperature=0.7, distill_top_k=5)
LAYOUTS = {
    "alone": {"micro_batch_size": 2},
    "tp2-sequence": {"tp": 2, "sequence_parallel": True},
    "dp2-zero3": {"dp": 2, "zero": 3, "overlap": "reduce and gather"},
    "cp2-zero1": {"cp": 2, "zero": 1},
    "pp2": {"pp": 2, "schedule": "zb-v"},
    "tp2": {"tp": 2, "micro_batch_size": 2},
    "dp2-zero2": {"dp": 2, "zero": 2, "micro_batch_size": 2},
    "cp2-tp2": {"cp": 2, "tp": 2},
    "tp2-pp2": {"tp": 2, "pp": 2, "sequence_parallel": True, "schedule": "interleaved-2"},
    "pp2-zero3": {"pp": 2, "dp": 2, "zero": 3, "overlap": "reduce"},
}


def teacher_of(student: Cell) -> Cell:
    """Return a larger network with the same vocabulary."""
    if student == OF_EXPERTS:
        return Cell("mixtral", key_values="gqa", tied=False, vocabulary=student.vocabulary)
    return Cell("llama", key_values="gqa", tied=student.tied, vocabulary=student.vocabulary)


@functools.cache
@one_thread()
def teacher_logits(student: Cell) -> Tensor:
    """Return the logits of the teacher for the student's samples, [samples, sequence, vocabulary]."""
    cell, whole = teacher_of(student), batch(student, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_cell, "HIDDEN", 24)
        weights = network(cell).weights(SEED, cell.torch_dtype, noise=0.2)
        found = oracle(cell).logits(weights, whole.tokens, whole.positions, whole.document_ids)
    return found[..., : VOCABULARIES[cell.vocabulary][0]]


def divergence(logits: Tensor, teacher: Tensor, settings: DistillationConfig) -> Tensor:
    """Return KL(teacher || network) of each token, from whole logits."""
    temperature = settings.distill_temperature
    if settings.distill_top_k is not None:
        kept = teacher.argsort(dim=-1, descending=True)[..., : settings.distill_top_k]
        teacher = torch.full_like(teacher, -torch.inf).scatter(-1, kept, teacher.gather(-1, kept))
    wanted = (teacher / temperature).softmax(-1)
    return (torch.xlogy(wanted, wanted) - wanted * (logits / temperature).log_softmax(-1)).sum(-1) * temperature**2


@functools.cache
@one_thread()
def expected(student: Cell, settings: DistillationConfig) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the oracle's gradients, and the means of the terms."""
    weights = network(student).weights(SEED, student.torch_dtype, noise=0.2)
    weights = {name: value.clone().requires_grad_() for name, value in weights.items()}
    whole = batch(student, 0)
    logits = oracle(student).logits(weights, whole.tokens, whole.positions, whole.document_ids)
    logits = logits[..., : VOCABULARIES[student.vocabulary][0]]
    lm_sum, count = loss_sum_and_count(logits, whole.labels, whole.loss_mask)
    apart = (divergence(logits, teacher_logits(student), settings) * whole.loss_mask).sum() / count
    weight = settings.distill_weight
    ((1 - weight) * lm_sum / count + weight * apart).backward()
    gradients = {name: value.grad for name, value in weights.items() if value.grad is not None}
    return gradients, {"lm_loss": (lm_sum / count).item(), DISTILL_LOSS: apart.item()}


STUDENTS = (
    Cell("gpt2", vocabulary="odd", loss_mask="random"),
    Cell("gemma", key_values="few", vocabulary="empty", loss_mask="random"),
    Cell("llama", key_values="few", tied=False, vocabulary="odd", documents=True),
)


OF_EXPERTS = Cell("llama", key_values="few", vocabulary="odd", documents=True, padding=True)
"""The student whose teacher has experts."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Cell, Path]:
    """Hugging Face folders of the students' teachers."""
    found = {cell: tmp_path_factory.mktemp("teacher") / "folder" for cell in (*STUDENTS, OF_EXPERTS)}
    for cell, folder in found.items():
        exported(teacher_of(cell), folder)
    return found


@pytest.mark.wide_except("alone-whole", "tp2-sequence-few", "dp2-zero3-whole", "cp2-zero1-whole", "pp2-few")
@pytest.mark.parametrize("settings", [WHOLE, FEW], ids=["whole", "few"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_with_a_teacher_has_the_oracles_gradients(
    layout: str, settings: DistillationConfig, folders: dict[Cell, Path], rank_pools: RankPools
) -> None:
    for student in STUDENTS:
        cell = replace(student, **LAYOUTS[layout])
        ranks = assert_the_oracles(cell, student, settings, folders[student], rank_pools)
        assert {rank.gathered == 0 for rank in ranks} == {cell.zero == 3}


def assert_the_oracles(
    cell: Cell, student: Cell, settings: DistillationConfig, folder: Path, rank_pools: RankPools
) -> list[Distilled]:
    """Assert that a step of the cell with the teacher in the folder has the gradients of one process; return it."""
    gradients, means = expected(student, replace(settings, distill_layout=()))
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    steps = on_ranks(rank_pools, cell.world_size, distilled_steps, [cell], folder, settings)
    ranks = [result for (result,) in steps]
    found = assemble(rank.gradients for rank in ranks)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert_gradient_close(found[name], gradient, norm, f"gradient of {name}")
    for rank in ranks:
        assert rank.means == pytest.approx(means, rel=1e-10)
        assert rank.same
        assert rank.separate
    return ranks


OWN_LAYOUTS = {
    "tp2 beside pp2": ({"tp": 2, "sequence_parallel": True}, "pp 2"),
    "pp2 beside tp2": ({"pp": 2, "schedule": "interleaved-2"}, "tp 2"),
    "cp2 beside tp2": ({"cp": 2}, "tp 2 sequence-parallel"),
    "dp2 beside tp2": ({"dp": 2}, "tp 2"),
    "tp2 beside cp2": ({"tp": 2, "micro_batch_size": 2}, "cp 2"),
    "tp2 beside dp2, with less than a micro-batch for each": ({"tp": 2, "micro_batch_size": 4}, "tp 1"),
    "zero3 beside cp2": ({"dp": 2, "zero": 3, "overlap": "reduce and gather"}, "cp 2"),
    "tp2-pp2 beside tp2-dp2": ({"tp": 2, "pp": 2}, "tp 2 sequence-parallel"),
    "cp2-tp2 beside pp2-dp2": ({"cp": 2, "tp": 2, "sequence_parallel": True}, "pp 2"),
    "zb-v beside cp2-tp2": ({"pp": 2, "dp": 2, "zero": 1, "schedule": "zb-v"}, "cp 2 tp 2"),
    "pp2-zero3 beside cp2": ({"pp": 2, "dp": 2, "zero": 3}, "cp 2"),
    "two instances of zero3 beside tp2-pp2": ({"dp": 4, "zero": 3, "instances": 2}, "tp 2 pp 2"),
}


@pytest.mark.wide_except(
    *("tp2 beside pp2-few", "cp2 beside tp2-whole", "dp2 beside tp2-whole", "zero3 beside cp2-few")
)
@pytest.mark.parametrize("settings", [WHOLE, FEW], ids=["whole", "few"])
@pytest.mark.parametrize("layouts", OWN_LAYOUTS)
def test_a_teacher_in_a_layout_of_its_own_is_the_same(
    layouts: str, settings: DistillationConfig, folders: dict[Cell, Path], rank_pools: RankPools
) -> None:
    layout, own = OWN_LAYOUTS[layouts]
    for student in STUDENTS:
        cell, divided = replace(student, **layout), replace(settings, distill_layout=tuple(own.split()))
        ranks = assert_the_oracles(cell, student, divided, folders[student], rank_pools)
        shards = cell.zero == 3 and "cp" in own  # otherwise one rank has all of a weight, which is not gathered
        assert {rank.gathered == 0 for rank in ranks} == {shards}


EXPERT_LAYOUTS = {
    "alone": ({"micro_batch_size": 2}, "tp 1"),
    "zero3 beside ep2": ({"dp": 2, "zero": 3}, "ep 2"),
    "tp2 beside ep2": ({"tp": 2, "sequence_parallel": True}, "ep 2"),
    "cp2 beside tp2-ep2": ({"cp": 2}, "tp 2 sequence-parallel ep 2 etp 1"),
    "dp2 beside tp2": ({"dp": 2}, "tp 2"),
    "pp2-dp2 beside cp2-ep2-etp2": ({"pp": 2, "dp": 2}, "cp 2 ep 2 etp 2"),
}


@pytest.mark.wide
@pytest.mark.parametrize("layouts", EXPERT_LAYOUTS)
def test_a_teacher_with_experts_in_a_layout_of_its_own_is_the_same(
    layouts: str, folders: dict[Cell, Path], rank_pools: RankPools
) -> None:
    layout, own = EXPERT_LAYOUTS[layouts]
    cell, divided = replace(OF_EXPERTS, **layout), replace(WHOLE, distill_layout=tuple(own.split()))
    assert_the_oracles(cell, OF_EXPERTS, divided, folders[OF_EXPERTS], rank_pools)


def tokenizer_of(tokens: int) -> Tokenizer:
    """Return a tokenizer with this number of tokens."""
    return build_tokenizer(DataConfig(seq_length=1, tokenizer_type="NullTokenizer"), tokens - 1)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("pp 8", "--distill-layout pp 8: the layout cannot divide the teacher: 8 stages are more"),
        ("tp 3", "--distill-layout tp 3: the layout cannot divide the teacher: --tensor-model-parallel-size 3 does"),
        ("cp 5", "--distill-layout cp 5: the layout cannot divide the teacher: --seq-length 12"),
        ("ep 3", "its 4 experts are not divisible by --expert-model-parallel-size 3"),
        ("tp 2 ep 2", "tensor-parallel ranks, 2, that divide its experts otherwise need sequence-parallel"),
        ("etp 5", "the width of its experts, .* is not divisible by --expert-tensor-parallel-size 5"),
    ],
)
def test_a_layout_that_cannot_divide_the_teacher_is_refused_before_the_ranks_meet(
    layout: str, message: str, folders: dict[Cell, Path]
) -> None:
    settings = replace(WHOLE, distill_layout=tuple(layout.split()))
    with pytest.raises(ConfigurationError, match=message):
        check_teacher(configuration(OF_EXPERTS, folders[OF_EXPERTS], settings), tokenizer_of(29))


@pytest.mark.parametrize("wrong", ["tokens", "positions", "layout", "heads", "experts"])
def test_a_teacher_that_does_not_fit_is_refused_before_the_ranks_meet(
    wrong: str, tmp_path: Path, folders: dict[Cell, Path]
) -> None:
    config, size = configuration(STUDENTS[0], folders[STUDENTS[0]], WHOLE), 29
    check_teacher(config, tokenizer_of(size))
    if wrong == "tokens":
        size, message = 32, "the teacher has 29 tokens, and the network that is trained has 32"
    elif wrong == "positions":
        policy = Policy.of(Cell("gpt2", vocabulary="odd"))
        export_weights(policy.chunks, policy.optimizer, tmp_path / "gpt2")
        config = configuration(replace(STUDENTS[0], sequence=48), tmp_path / "gpt2", WHOLE)
        message = "positions, which are fewer than --seq-length 48"
    elif wrong == "experts":
        exported(Cell("mixtral", key_values="gqa", tied=False, vocabulary="odd"), tmp_path / "experts")
        config = configuration(STUDENTS[0], tmp_path / "experts", WHOLE)
        config = replace(config, parallel=replace(config.parallel, expert_model_parallel_size=3))
        message = "its 4 experts are not divisible by --expert-model-parallel-size 3"
    elif wrong == "heads":
        config = replace(config, parallel=replace(config.parallel, context_parallel_size=3, cp_comm_type=("a2a",)))
        message = "cannot divide the teacher: .*a2a"
    else:
        config, message = configuration(replace(STUDENTS[0], pp=8), folders[STUDENTS[0]], WHOLE), "8 stages are more"
    with pytest.raises(ConfigurationError, match=message):
        check_teacher(config, tokenizer_of(size))
