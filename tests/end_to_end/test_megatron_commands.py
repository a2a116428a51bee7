"""Megatron-LM's own commands run to the end: those of its tests and examples, scaled down in sizes and paths alone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megalite.config.parse import parse_arguments
from tests.end_to_end.runs import PRETRAIN, ended, iterations, latest_iteration, losses
from tests.harness.job import Job
from tests.megatron_commands.scale import ITERATIONS, command, scaled, write_files

RUNS = {
    "gpt/gpt3_15b_8t_release": (2, 1),
}
"""Ranks of each command, and how many of them share their weights at least."""
WIDE = {
    "gpt/gpt3_mcore_te_tp1_pp1_dist_optimizer_no_mmap_bin_files": (1, 1),
    "gpt/gpt3_mcore_te_tp1_pp4_vp1_dist_optimizer_overlap_grad_reduce_param_gather": (4, 2),
    "moe/gpt3_mcore_te_tp2_pp1_te_8experts_etp1_ep4": (4, 1),
    "v2.5:examples/pretrain_gpt_distributed_with_mp.sh": (4, 1),
    "gpt/gpt3_mcore_te_tp1_pp2_cp4_a2a_p2p_nondeterministic": (4, 1),
    "gpt/gpt3_mcore_reruns_reshard": (4, 1),  # tensor, sequence and pipeline parallel; the options of a Llama
    "moe/gpt3_moe_mcore_te_ep8_resume_torch_dist_dist_muon": (2, 1),
    "bigcode-project/Megatron-LM HEAD:examples/pretrain_gpt.sh": (1, 1),
    "core_v0.8.0:examples/mixtral/train_mixtral_8x7b_distributed.sh": (4, 2),
    "gpt/gpt3_mcore_te_tp2_pp2_cp2": (8, 1),
    "gpt/gpt3_mcore_te_tp2_pp1_cp2_nondeterministic": (4, 1),
    "gpt/gpt3_mcore_te_tp1_pp4_vp1_uneven_pipeline": (4, 1),
    "gpt/gpt3_mcore_te_tp1_pp4_vp2_account_for_embedding_loss_in_pipeline_split": (4, 1),
    "gpt/gpt3_mcore_te_tp2_pp1_multi_dist_optimizer_instances": (4, 4),
    "gpt/gpt3_mcore_te_tp1_pp4_disable_bias_linear": (4, 1),
    "mixtral/mixtral_8x7b_alltoall_tp2pp4ep4_release": (4, 2),
    "moe/gpt3_moe_mcore_te_tp4_ep2_etp2_pp2_resume_torch_dist_dist_optimizer": (4, 1),
    "gpt/gpt3_mcore_te_tp2_pp1_gdn_no_nvrx_async": (2, 1),
    "gpt/gpt3_mcore_te_tp2_pp1_gdn_no_nvrx_async_mcore": (4, 2),
    "gpt/gpt3_mcore_te_tp2_pp1_gdn_no_nvrx_sync": (2, 1),
    "gpt/gpt3_mcore_te_tp2_pp2_dsa": (4, 1),
    "gpt/gpt3_mcore_te_tp2_pp2_mla": (4, 1),
    "gpt/gpt3_mcore_te_tp2_pp2_mla_1node": (2, 1),
    "moe/deepseek_proxy_fsdp_ep2_fsdp2": (4, 2),
    "moe/deepseek_proxy_fsdp_ep2_fsdp2_ep_overlap": (2, 1),
    "moe/gpt3_mcore_te_tp2_pp2_ep4_etp1_memory_speed": (4, 1),
    "mixtral/deepseekv3_proxy_flex_tp1pp4emp16etp1cp1_release": (4, 1),
    "mixtral/deepseekv3_proxy_flex_tp1pp4emp16etp1cp1_release_sm": (8, 1),
    "mixtral/deepseekv3_proxy_flex_tp2pp2emp16etp1cp1_gb_200_release": (4, 1),
    "mixtral/deepseekv3_proxy_flex_tp2pp2emp16etp1cp1_gb_200_release_sm": (8, 2),
    "hybrid/hybrid_mr_mcore_te_tp1_pp1_cp1_dgx_a100_1N8G": (2, 2),
    "hybrid/hybrid_mr_mcore_te_tp1_pp2_vpp2_cp1_dgx_a100_1N8G": (2, 1),
    "hybrid/hybrid_mr_mcore_te_tp1_pp4_cp1_dgx_a100_1N8G": (4, 1),
    "hybrid/hybrid_mr_mcore_te_tp2_pp1_cp1_dgx_a100_1N8G": (2, 1),
    "hybrid/hybrid_mr_mcore_te_tp2_pp1_cp4_dgx_a100_1N8G": (8, 1),
}
RESUMED = {
    "gpt/gpt3_mcore_te_tp2_zp_z3_resume_fsdp_dtensor": (2, 2),
}
WIDE_RESUMED = {
    "gpt/gpt3_mcore_te_tp4_pp1_resume_torch_dist_dist_optimizer_overlap_grad_reduce_param_gather": (4, 2),
    "gpt/gpt3_mcore_te_tp1_pp2_resume_torch_dist_rope_embeddings_interleaved_no_fusion": (2, 1),
    "gpt/gpt3_mcore_te_tp4_pp1_resume_torch_dist_qk_layernorm_test_mode": (2, 1),
    "gpt/gpt3_mcore_te_tp1_pp4_resume_torch_dist_swiglu": (4, 1),
    "moe/gpt3_mcore_te_tp2_zp_z3_resume_torch_dist_te_8experts2parallel_top2router": (4, 2),
    "gpt/gpt3_mcore_te_tp2_pp1_gdn": (2, 1),
    "gpt/gpt3_mcore_te_tp2_pp1_gdn_1node": (4, 2),
}
Train = Callable[..., str]


def cases(*, usual: dict[str, tuple[int, int]], wide: dict[str, tuple[int, int]]) -> list[object]:
    """Return the parameters of a test, with the command's name."""
    marks = dict.fromkeys(wide, (pytest.mark.wide,))
    return [
        pytest.param(name, *ranks, marks=marks.get(name, ()), id=Path(name).stem)
        for name, ranks in (usual | wide).items()
    ]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the files that commands name."""
    folder = tmp_path_factory.mktemp("files")
    write_files(folder)
    return folder


@pytest.fixture
def train(spawn: Callable[..., Job], files: Path, tmp_path: Path) -> Train:
    """Run a command with further flags on this number of ranks; return the output."""

    def run(name: str, ranks: int, replicas: int, *more: str, without: Sequence[str] = (), expected: int = 0) -> str:
        flags = scaled(command(name), files, tmp_path, ranks, replicas, without)
        program = PRETRAIN.with_name("pretrain_hybrid.py") if name.startswith("hybrid/") else PRETRAIN
        out = ended(spawn([program, *flags, *more], ranks), expected).stdout
        assert all(note in out for note in parse_arguments(flags).notes)
        return out

    return run


@pytest.mark.parametrize(("name", "ranks", "replicas"), cases(usual=RUNS, wide=WIDE))
def test_a_command_trains(name: str, ranks: int, replicas: int, train: Train, tmp_path: Path) -> None:
    train(name, ranks, replicas)
    check(tmp_path / "run")


@pytest.mark.wide
@pytest.mark.parametrize(("name", "ranks", "replicas"), cases(usual=RESUMED, wide=WIDE_RESUMED))
def test_a_command_resumes(name: str, ranks: int, replicas: int, train: Train, tmp_path: Path) -> None:
    """Run half of the steps, and then the same command, as Megatron-LM's tests do."""
    half = ITERATIONS // 2
    train(name, ranks, replicas, "--exit-interval", str(half), expected=85)
    assert iterations(tmp_path / "run") == [*range(1, half + 1)]
    out = train(name, ranks, replicas)
    assert f"continues from {tmp_path}/run/iter_{half:07d}" in out
    check(tmp_path / "run")


@pytest.mark.wide
def test_a_command_trains_the_weights_of_another_run(train: Train, tmp_path: Path) -> None:
    """The same command makes these weights, because those that it names are not public."""
    name = "nemotron/nemotron3_5_lightning_no_load_optim_tp1_pp1_cp1_ep4_dgx_gb200_1N4G"
    train(name, 2, 1, "--save", str(tmp_path / "load"), without=["load", "finetune", "no-load-optim", "no-load-rng"])
    out = train(name, 4, 2)
    assert f"weights of {tmp_path}/load" in out
    check(tmp_path / "run")


def check(run: Path) -> None:
    """Check that a run has learned, and what it has left."""
    found = losses(run)
    assert iterations(run) == [*range(1, len(found) + 1)]
    assert len(found) >= ITERATIONS
    assert all(map(math.isfinite, found))
    assert found[-1] < found[0]
    assert latest_iteration(run) == len(found)
    assert json.loads((run / f"iter_{len(found):07d}/manifest.json").read_text())["tensors"]
    assert (run / "DONE").exists()
