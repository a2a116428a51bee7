"""The relations between the flags of the pipeline: its layout and its schedule."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.model import ModelConfig
from megalite.config.parallel import ParallelConfig
from megalite.config.pipeline_layout import schedule_name, shape, stage_layers, virtual_stages
from megalite.config.run import RunConfig
from megalite.errors import ConfigurationError

_NUMBERS_OF_STAGES = """num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank
    pipeline_model_parallel_layout"""
_FIRST_AND_LAST = "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers"
_ACCOUNTS = "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split"


def pipeline_problems(config: RunConfig) -> Iterator[str]:
    """One line for each relation that does not hold. Layers are counted once the flags do not contradict each other."""
    contradictions = list(_contradictions(config.parallel))
    if contradictions:
        yield from contradictions
        return
    try:
        stage_layers(config.model, config.parallel)
    except ConfigurationError as error:
        yield str(error)
    else:
        yield from _schedule(config.model, config.parallel)


def why_nothing_is_aligned(model: ModelConfig, parallel: ParallelConfig) -> str | None:
    """Return why the pipeline's ranks have no reductions to begin together; None if they have."""
    if not parallel.overlap_grad_reduce:
        return "without --overlap-grad-reduce"
    if parallel.zero_stage >= 2:
        return "where gradients are reduced behind every micro-batch (ZeRO 2 and 3)"
    if shape(parallel).v_shaped:
        return f"with {parallel.pipeline_schedule}, whose chunks end in another order"
    try:
        chunks = virtual_stages(model, parallel)
    except ConfigurationError:  # which `validate` tells
        return None
    return "with one stage a rank" if chunks == 1 else None


def _contradictions(parallel: ParallelConfig) -> Iterator[str]:
    """Refuse what is said in two ways at once, or of a pipeline that is not there."""
    ways = _given(parallel, _NUMBERS_OF_STAGES)
    if len(ways) > 1:
        yield f"{' and '.join(ways)} each give the stages of a rank: keep one"
    ends, accounts = _given(parallel, _FIRST_AND_LAST), _given(parallel, _ACCOUNTS)
    if parallel.pipeline_model_parallel_layout is not None:
        for flag in (*ends, *accounts):
            yield f"--pipeline-model-parallel-layout says what each stage holds: leave {flag} out"
    elif ends and accounts:
        yield f"{' and '.join((*ends, *accounts))} are two ways to make stages uneven: choose one"
    elif ends and parallel.num_layers_per_virtual_pipeline_stage is not None:
        yield f"{ends[0]} needs --num-virtual-stages-per-pipeline-rank in place of {ways[0]}"
    if ends and parallel.pipeline_model_parallel_size == 1:
        yield f"{' and '.join(ends)}: --pipeline-model-parallel-size is 1, so there is one rank: leave it out"


def _schedule(model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
    """A schedule that does not go with so many stages a rank."""
    ranks, name = parallel.pipeline_model_parallel_size, parallel.pipeline_schedule
    chunks, taken = virtual_stages(model, parallel), shape(parallel).chunks
    if name is not None and taken is None and chunks == 1:
        yield f"--pipeline-schedule {name} takes several stages a rank: --num-virtual-stages-per-pipeline-rank"
    elif name is not None and taken not in (None, chunks):
        wanted, other = ("one stage", ": interleaved-1f1b takes several") if taken == 1 else (f"{taken} stages", "")
        yield f"--pipeline-schedule {name} takes {wanted} a rank, not {chunks}{other}"
    elif taken != chunks and chunks > 1 and ranks == 1:
        yield f"{chunks} stages a rank need --pipeline-model-parallel-size 2 or more"
    group = parallel.microbatch_group_size_per_virtual_pipeline_stage
    if group is not None:
        flag = f"--microbatch-group-size-per-virtual-pipeline-stage {group}"
        if schedule_name(model, parallel) != "interleaved-1f1b":
            yield f"{flag} needs several stages a rank, and the schedule interleaved-1f1b"
        elif group < ranks:
            yield f"{flag} is less than --pipeline-model-parallel-size {ranks}: each group must keep all ranks busy"


def _given(parallel: ParallelConfig, names: str) -> list[str]:
    """Return the flags that are given, with their values."""
    values = {name: getattr(parallel, name) for name in names.split()}
    given = {name: value for name, value in values.items() if value not in (None, False)}
    return [f"--{name.replace('_', '-')}{'' if value is True else f' {value}'}" for name, value in given.items()]
