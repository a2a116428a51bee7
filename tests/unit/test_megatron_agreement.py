"""Megatron-LM's flags mean here what they mean there: megatron-core, configured from the flags of Megatron-LM's tests,
and megalite compute the same loss and the same gradient norm from the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megalite.config.command_line import flag_groups
from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.conversion.megatron import open_megatron
from megalite.parallel.mesh import ParallelMesh
from megalite.training.data import open_data
from tests.end_to_end.runs import words
from tests.harness import megatron_training
from tests.harness.gpt_trainer import gpt_trainer
from tests.harness.rank_pool import RankPools
from tests.megatron_commands.scale import DENSE, FILES, PATHS, SPARSE, command, scaled

pytestmark = pytest.mark.costly

COMMANDS = [
    "gpt/gpt3_mcore_te_tp1_pp1_dist_optimizer_no_mmap_bin_files",
    "gpt/gpt3_mcore_te_tp1_pp4_disable_bias_linear",
    "gpt/gpt3_mcore_te_tp1_pp2_rope_embeddings_interleaved_no_fusion",
    "gpt/gpt3_mcore_te_tp4_pp1_qk_layernorm_test_mode",
    "gpt/gpt3_mcore_reruns_reshard",
    "gpt/gpt3_15b_8t_release",
    "moe/gpt3_mcore_te_tp2_pp1_te_8experts_etp1_ep4",
    "moe/gpt3_moe_mcore_te_tp4_ep2_etp2_pp2_resume_torch_dist_dist_optimizer",
    "mixtral/mixtral_8x7b_alltoall_tp2pp4ep4_release",
]
DROPPED = {*DENSE, *SPARSE, *FILES, *PATHS, "sequence-parallel", "bf16", "tokenizer-type", "async-save", "ckpt-format"}
DROPPED |= {"step-batch-size-schedule", "save-interval", "save-retain-interval", "use-checkpoint-opt-param-scheduler"}
"""Flags that one process in fp32 on random tokens cannot have, or does not need."""
RANDOM = words("--mock-data --tokenizer-type NullTokenizer --vocab-size 127 --hidden-dropout 0 --attention-dropout 0")


def alone(name: str, folder: Path) -> list[str]:
    """Return the flags of a test for one process in fp32."""
    groups = flag_groups(scaled(command(name), folder, folder, 1))
    kept = [word for flag, values in groups if flag not in DROPPED for word in (f"--{flag}", *values)]
    return [*kept, *RANDOM]


@pytest.mark.wide_except(
    "gpt3_mcore_te_tp1_pp2_rope_embeddings_interleaved_no_fusion",
    "gpt3_mcore_reruns_reshard",
    "gpt3_mcore_te_tp1_pp1_dist_optimizer_no_mmap_bin_files",
    "gpt3_mcore_te_tp2_pp1_te_8experts_etp1_ep4",
)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, id=Path(name).name, marks=[pytest.mark.wide] * (place % 2))
        for place, name in enumerate(COMMANDS)
    ],
)
def test_loss_and_gradient_norm_are_megatrons(name: str, rank_pools: RankPools, tmp_path: Path) -> None:
    """Megatron-LM's network is configured from the flags, draws the weights and saves them, which are converted."""
    flags = alone(name, tmp_path)
    config = resolve(parse_arguments(flags).config, 1)
    trainer = gpt_trainer(config, open_data(config), ParallelMesh())
    samples = [trainer.task.data.train[number] for number in range(trainer.task.batch_size.final)]
    batches = [[torch.from_numpy(sample[part])[None] for part in ("tokens", "labels")] for sample in samples]
    folder = tmp_path / "iter_0000007"
    (theirs,) = rank_pools(1).run(megatron_training.step, flags, batches, folder)
    trainer.load_model(open_megatron(folder))
    with trainer.loader:
        ours = trainer.step()
    assert (ours.loss, ours.grad_norm) == pytest.approx(theirs, rel=1e-6)
