"""Command that runs a plan: the flags of the run with those of its layout."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from megalite.config import RunConfig
from megalite.config.command_line import flag_groups, words_of
from megalite.config.fields import flag_of
from megalite.config.layer_specs import NEXT_STAGE, PATTERN_FLAG
from megalite.config.megatron_flags import tables
from megalite.process.names import as_installed, has_commands
from megalite.process.output import shell_word

_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
"""Setting without which the attempts of torchrun share a store (docs/launchers.md)."""

_CHOSEN = {
    "parallel": """tensor_model_parallel_size sequence_parallel pipeline_model_parallel_size context_parallel_size
        cp_comm_type hierarchical_context_parallel_sizes expert_model_parallel_size expert_tensor_parallel_size
        pipeline_schedule num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank
        pipeline_model_parallel_layout decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers
        account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
        mtp_standalone microbatch_group_size_per_virtual_pipeline_stage use_distributed_optimizer
        data_parallel_sharding_strategy num_distributed_optimizer_instances overlap_grad_reduce overlap_param_gather
        ddp_bucket_size""",
    "training": "micro_batch_size recompute_granularity recompute_modules recompute_method recompute_num_layers",
}
"""Fields that a layout sets."""
_REQUIRED = "micro_batch_size"


def without_layout(argv: Sequence[str]) -> list[str]:
    """Return the flags of a run without those that a layout sets, also without stages in a pattern."""
    chosen = {flag_of(name)[2:] for names in _CHOSEN.values() for name in names.split()}
    aliases, shorthands = tables()["aliases"], tables()["shorthands"]
    rest: list[str] = []
    for flag, values in flag_groups(argv):
        meant = aliases.get(flag, flag)
        first = next(iter(re.findall(r"--([\w-]+)", shorthands.get(flag, ""))), meant)
        if flag_of(meant) == PATTERN_FLAG:
            values = [value.replace(NEXT_STAGE, "") for value in values]
        if first.removeprefix("no-") not in chosen:
            rest += words_of(flag, values)
    return rest


def layout_flags(config: RunConfig, base: RunConfig) -> Iterator[list[str]]:
    """Yield each flag, with its values, that a run needs to have the layout of `config` in place of that of `base`."""
    layout, pattern = config.parallel.pipeline_model_parallel_layout, config.model.hybrid_layer_pattern
    if pattern is not None and base.parallel.pipeline_model_parallel_layout not in (None, layout):
        yield words_of(PATTERN_FLAG[2:], [pattern])  # in place of one with stages, in a file
        base = replace(base, parallel=replace(base.parallel, pipeline_model_parallel_layout=None))
    for section, names in _CHOSEN.items():
        for name in names.split():
            value = getattr(getattr(config, section), name)
            if name != _REQUIRED and value == getattr(getattr(base, section), name):
                continue
            if isinstance(value, bool):
                yield [flag_of(name) if value else flag_of(f"no_{name}")]
            else:
                yield [flag_of(name), *(map(str, value) if isinstance(value, tuple) else [str(value)])]


def commands(argv: Sequence[str], nodes: int, per_node: int) -> Iterator[str]:
    """Yield the command that starts a run, by torchrun and by SLURM."""
    flags = " \\\n    ".join(" ".join(map(shell_word, words_of(flag, values))) for flag, values in flag_groups(argv))
    place = "--standalone" if nodes == 1 else f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint $NODE0:$PORT"
    run = as_installed(f"torchrun {place} --nproc-per-node {per_node} pretrain_gpt.py")
    yield f"{_OWN_STORE} {run} \\\n    {flags}"
    if has_commands():
        places = f"--nodes={nodes} --ntasks-per-node={per_node} --gpus-per-node={per_node}"
        yield f"srun {places} megalite-pretrain \\\n    {flags} --save run/plan --resume auto"
        return
    yield (f"RUN=run/plan sbatch --nodes={nodes} --gpus-per-node={per_node} slurm/pretrain_gpt.sbatch \\\n    {flags}")
