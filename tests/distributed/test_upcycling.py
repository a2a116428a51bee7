"""Networks with experts that start from a dense one: the same function, on any layout of either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalite.checkpoint.manifest import read_manifest
from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.errors import CheckpointError, ConfigurationError
from megalite.lifecycle.startup import Startup
from megalite.parallel.mesh import ParallelMesh
from megalite.process.place import Place
from megalite.run.run import Run, make_synchronization
from megalite.tasks.gpt_task import GPTTask
from megalite.training.data import open_data
from megalite.training.display import Display
from megalite.training.resume import saved_fields
from megalite.training.trainer import Trainer
from megalite.watchdog.sections import Sections
from tests.distributed.layout_expected import assemble, on_ranks
from tests.distributed.layout_run import held
from tests.harness.rank_pool import RankPools
from tests.harness.unsharded import unsharded_parameters
from tests.harness.wide import wide_except

DENSE = """--fp64 --mock-data --tokenizer-type NullTokenizer --vocab-size 28 --make-vocab-size-divisible-by 4
--num-layers 4 --hidden-size 16 --ffn-hidden-size 24 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8
--init-method-std 0.2 --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 1 --global-batch-size 4
--eval-iters 0 --lr 0.02 --lr-decay-style constant --weight-decay 0"""
EXPERTS = "--num-experts 4 --moe-layer-freq [0,1,1,1] --moe-aux-loss-coeff 0.1 --moe-use-upcycling"
BIASED = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"


def begun(flags: str) -> Trainer:
    """Return a trainer as a run begins with it."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    config = resolve(parse_arguments(flags.split(), saved_fields).config, size)
    mesh = ParallelMesh(rank=rank, world_size=size, **config.parallel.mesh_sizes)
    place = Place(rank, rank, size)
    run = Run(config, lambda mesh: GPTTask(config, open_data(config), mesh), place, Startup(place))
    run.mesh, run._synchronization, run.sections = mesh, make_synchronization(config, mesh), Sections()
    run.task = GPTTask(config, open_data(config), mesh)
    run._begin()
    assert run.trainer is not None
    return run.trainer


def saved(flags: str) -> None:
    """Train to the end of a run, and save it."""
    trainer = begun(flags)
    with trainer.loader, Display(1, 1, enabled=False) as display:
        while trainer.iteration < trainer.iterations:
            trainer.step()
        trainer.save(display, last=True)


def trained(flags: str) -> tuple[dict[str, Any], list[float], tuple[str, ...]]:
    """Return the weights that a run begins with, the losses of its steps, and its notes."""
    trainer = begun(flags)
    with unsharded_parameters(trainer.optimizer):
        weights = held(trainer.network, trainer.mesh, lambda parameter: parameter)
    with trainer.loader:
        losses = [trainer.step().loss for _ in range(2)]
    return weights, losses, trainer.notes()


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a dense run on two stages with sharded state."""
    folder = tmp_path_factory.mktemp("dense") / "run"
    pools = RankPools()
    try:
        pools(2).run(saved, f"{DENSE} --pp 2 --train-iters 2 --save {folder}")
    finally:
        pools.close()
    return folder


LAYOUTS = {
    "alone": (1, ""),
    "experts-apart": (4, "--ep 2 --pp 2"),
    "parts": (2, "--tp 2 --sequence-parallel"),
    "sharded": (2, "--ep 2 --data-parallel-sharding-strategy optim_grads_params"),
}


UPCYCLED = "--num-experts 8 --moe-router-topk 3 --moe-use-upcycling"


@pytest.mark.parametrize(
    "layouts", wide_except(["alone experts-apart", "alone parts sharded"], ["alone experts-apart"])
)
@pytest.mark.parametrize("more", [pytest.param("", marks=pytest.mark.wide), BIASED], ids=["softmax", "sigmoid"])
def test_upcycling_keeps_the_function_on_every_layout(
    more: str, layouts: str, dense: Path, rank_pools: RankPools
) -> None:
    """The first step's loss is the dense model's, and from then on all layouts train the same."""
    ((_, (expected, _), _),) = on_ranks(rank_pools, 1, trained, f"{DENSE} --train-iters 2 --load {dense} --finetune")
    flags = f"{DENSE} --train-iters 2 --load {dense} {EXPERTS} {more}"
    first: dict[str, Tensor] = {}
    after = None
    for ranks, layout in map(LAYOUTS.__getitem__, layouts.split()):
        results = on_ranks(rank_pools, ranks, trained, f"{flags} {layout}")
        weights = assemble([held for held, _, _ in results])
        first = first or weights
        assert weights.keys() == first.keys()
        for name, values in weights.items():
            assert torch.equal(values, first[name]), name
        for _, (loss, later), notes in results:
            assert loss == pytest.approx(expected, rel=1e-12)
            after = after or later
            assert later == pytest.approx(after, rel=1e-10)
            assert not any("do not add up" in note for note in notes)


def test_each_expert_is_a_copy_and_the_router_is_drawn(dense: Path, rank_pools: RankPools) -> None:
    flags = f"{DENSE} --train-iters 2 --load {dense}"
    ((before, _, _),) = on_ranks(rank_pools, 1, trained, f"{flags} --finetune")
    ((after, _, _),) = on_ranks(rank_pools, 1, trained, f"{flags} {EXPERTS}")
    drawn = f"{DENSE} --train-iters 2 {EXPERTS}".replace("--moe-use-upcycling", "")
    ((initial, _, _),) = on_ranks(rank_pools, 1, trained, drawn)
    before, after, initial = (assemble([each]) for each in (before, after, initial))
    assert after.keys() == initial.keys()
    for name, values in after.items():
        if name.endswith("moe.router"):
            assert torch.equal(values, initial[name])
        elif ".moe." in name:
            of_layer = before[name.replace(".moe.", ".mlp.")]
            assert all(torch.equal(expert, of_layer) for expert in values)
        else:
            assert torch.equal(values, before[name])


def test_an_upcycled_run_saves_and_resumes(dense: Path, tmp_path: Path) -> None:
    flags = f"{DENSE} --load {dense} {EXPERTS} --save {tmp_path / 'run'} --resume auto"
    saved(f"{flags} --train-iters 1")
    assert read_manifest(tmp_path / "run" / "iter_0000001").config["model"]["num_experts"] == 4
    assert begun(f"{flags} --train-iters 2").iteration == 1


def test_a_hugging_face_folder_is_upcycled(tmp_path: Path) -> None:
    """The network is that of the folder, with experts."""
    from tests.harness import huggingface as theirs  # takes a second, which no rank needs

    theirs.save(tmp_path / "llama", "llama")
    run = """--mock-data --tokenizer-type NullTokenizer --seq-length 32 --micro-batch-size 2 --train-iters 2 --lr 1e-3
        --eval-iters 0"""
    _, (expected, _), _ = trained(f"{run} --load {tmp_path / 'llama'}")
    given = f"{run} --load {tmp_path / 'llama'} --num-experts 8 --moe-router-topk 3 --moe-use-upcycling"
    _, (loss, _), notes = trained(given)
    assert loss == pytest.approx(expected, rel=1e-5)  # fp32
    assert not any("do not add up" in note for note in notes)
    _, (loss, _), notes = trained(f"{given} --moe-router-pre-softmax")
    assert loss != pytest.approx(expected, rel=1e-3)
    assert any("the weights of a token's experts do not add up to 1" in note for note in notes)
    _, _, notes = trained(f"{given} --moe-expert-capacity-factor 1.0")
    assert any("--moe-expert-capacity-factor drops experts of tokens" in note for note in notes)


@pytest.mark.wide
def test_what_cannot_be_upcycled_is_refused(dense: Path, tmp_path: Path) -> None:
    flags = f"{DENSE} --train-iters 1"
    with pytest.raises(CheckpointError, match=r"of width 24, of which experts of width 12 .* --moe-ffn-hidden-size 24"):
        begun(f"{flags} --load {dense} {EXPERTS} --moe-ffn-hidden-size 12")
    saved(f"{flags} --load {dense} {EXPERTS} --save {tmp_path / 'experts'}")
    with pytest.raises(CheckpointError, match="has experts already: drop --moe-use-upcycling"):
        begun(f"{flags} --load {tmp_path / 'experts'} {EXPERTS}")
    with pytest.raises(CheckpointError, match=r"is from another model.*\n  swiglu: False in the checkpoint, True"):
        begun(f"{flags} --load {dense} {EXPERTS} --swiglu")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match=r"--moe-use-upcycling: --load .* has no checkpoint of a dense model"):
        begun(f"{flags} --load {tmp_path / 'empty'} {EXPERTS}")
    for more, words in {
        f"--load {dense} {EXPERTS} --moe-latent-size 4": (
            "--moe-use-upcycling needs experts of the full width, without --moe-latent-size"
        ),
        EXPERTS: "--moe-use-upcycling needs --load",
        f"--load {dense} --moe-use-upcycling": "--moe-use-upcycling needs --num-experts",
        f"--load {dense} {EXPERTS} --finetune": "--finetune has no effect with --moe-use-upcycling",
    }.items():
        with pytest.raises(ConfigurationError, match=words):
            begun(f"{flags} {more}")


@pytest.mark.wide
@pytest.mark.parametrize("more", [pytest.param("", marks=pytest.mark.wide), UPCYCLED])
@pytest.mark.parametrize("tokenizer", ["--tokenizer-type NullTokenizer", "the folder's own"])
def test_the_command_of_a_run_from_a_folder_continues_it(tmp_path: Path, more: str, tokenizer: str) -> None:
    from tests.harness import huggingface as theirs
    from tests.harness.template_tokenizer import write_template_tokenizer

    theirs.save(tmp_path / "llama", "llama")
    own = not tokenizer.startswith("--")
    if own:
        write_template_tokenizer(tmp_path / "llama")
    flags = f"""--mock-data {"" if own else tokenizer} --seq-length 32 --micro-batch-size 2 --lr 1e-3 --eval-iters 0
        {more} --load {tmp_path / "llama"} --save {tmp_path / "run"} --resume auto --lr-decay-iters 4"""
    first = resolve(parse_arguments(f"{flags} --train-iters 2".split(), saved_fields).config, 1)
    saved(f"{flags} --train-iters 2")
    second = resolve(parse_arguments(f"{flags} --train-iters 2".split(), saved_fields).config, 1)
    assert second == first
    trainer = begun(f"{flags} --train-iters 3")
    with trainer.loader:
        assert trainer.iteration == 2
