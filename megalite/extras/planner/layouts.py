"""Layouts of a run on a number of GPUs: every combination of sizes that divide each other, as configurations."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import product
from math import gcd
from typing import Any, Literal

from megalite.config import ModelConfig, RunConfig
from megalite.config.parallel import STRATEGIES, ParallelConfig, ScheduleName
from megalite.config.pipeline_layout import schedule_name, virtual_stages
from megalite.config.validate_model import uneven_widths, with_router_weights
from megalite.errors import ConfigurationError

Recompute = Literal["none", "selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
_MOST_SAMPLES = 64
"""Largest micro-batch that is tried."""
_UNEVEN_CHUNKS = (1, 2, 4)
"""Stages per rank that are tried where the layers cannot be divided evenly."""


@dataclass(frozen=True, order=True)
class Layout:
    """Sizes of all axes, and what else a search may choose."""

    tensor: int
    sequence: bool
    pipeline: int
    chunks: int
    """Stages per pipeline rank."""
    schedule: ScheduleName
    context: int
    expert: int
    expert_tensor: int
    zero: int
    recompute: Recompute
    micro_batch: int

    def __str__(self) -> str:
        sizes = {"CP": self.context, "PP": self.pipeline, "VP": self.chunks, "EP": self.expert}
        words = [f"TP {self.tensor}{' with SP' if self.sequence else ''}"]
        words += [f"{name} {size}" for name, size in sizes.items() if size > 1]
        words += [f"ETP {self.expert_tensor}"] * (self.expert_tensor != self.tensor and self.expert > 0)
        words += [f"{self.schedule}"] * self.schedule.startswith("zb")
        words += [f"ZeRO {self.zero}", f"recompute {self.recompute}", f"micro-batch {self.micro_batch}"]
        return ", ".join(words)

    @staticmethod
    def of(config: RunConfig) -> Layout:
        """Return the layout that the flags of a run describe. Raises ConfigurationError if its layers do not divide."""
        parallel, training = config.parallel, config.training
        chunks = virtual_stages(config.model, parallel)
        sizes = parallel.mesh_sizes
        experts = config.model.num_experts is not None
        return Layout(
            parallel.tensor_model_parallel_size,
            parallel.sequence_parallel,
            parallel.pipeline_model_parallel_size,
            chunks,
            schedule_name(chunks, parallel),
            parallel.context_parallel_size,
            sizes["expert_parallel_size"] if experts else 0,
            sizes["expert_tensor_parallel_size"],
            parallel.zero_stage,
            training.recompute_granularity or "none",
            training.micro_batch_size,
        )

    def with_fewest_ranks(self) -> Layout:
        """Return the layout with the fewest context-parallel ranks and as many tokens on each of them."""
        common = gcd(self.context, self.micro_batch)
        return replace(self, context=self.context // common, micro_batch=self.micro_batch // common)

    def on(self, config: RunConfig, stages: str | None = None) -> RunConfig:
        """Return a run with this layout. Flags of an axis that the run has as this layout does stay as they are.

        Args:
            stages: contents of the stages as letters, for layers that cannot be divided evenly.
        """
        own = _layout_of(config)

        def same(*axes: str) -> bool:
            return own is not None and all(getattr(own, axis) == getattr(self, axis) for axis in axes)

        changed: dict[str, Any] = {
            "tensor_model_parallel_size": self.tensor,
            "sequence_parallel": self.sequence,
            "pipeline_model_parallel_size": self.pipeline,
            "context_parallel_size": self.context,
            "expert_model_parallel_size": self.expert or 1,
            "expert_tensor_parallel_size": self.expert_tensor if self.expert_tensor != self.tensor else None,
        }
        if stages is not None or not same("pipeline", "chunks"):
            chunks = self.chunks if self.chunks > 1 and stages is None else None
            changed |= _EVEN_STAGES
            changed |= {"num_virtual_stages_per_pipeline_rank": chunks, "pipeline_model_parallel_layout": stages}
        if not same("pipeline", "chunks", "schedule"):
            standard = "interleaved-1f1b" if self.chunks > 1 else "1f1b"
            changed["pipeline_schedule"] = None if self.schedule == standard else self.schedule
        if not same("context"):
            changed |= {"hierarchical_context_parallel_sizes": (), "cp_chunks_per_rank": None}
            if self.context == 1:
                changed |= {"cp_comm_type": ParallelConfig.cp_comm_type, "cp_balance": ParallelConfig.cp_balance}
        if not same("zero"):
            parallel = config.parallel
            overlapped = parallel.overlap_param_gather if parallel.zero_stage else parallel.overlap_grad_reduce
            changed |= {
                "use_distributed_optimizer": self.zero == 1 or (self.zero > 1 and parallel.use_distributed_optimizer),
                "data_parallel_sharding_strategy": STRATEGIES[self.zero] if self.zero > 1 else None,
                "num_distributed_optimizer_instances": parallel.num_distributed_optimizer_instances if self.zero else 1,
                "overlap_param_gather": overlapped and self.zero > 0,
            }
        training = replace(config.training, micro_batch_size=self.micro_batch)
        if not same("recompute"):
            training = replace(training, **_recomputing(config, self.recompute))
        parallel = replace(config.parallel, **changed)
        return replace(config, parallel=parallel, training=training, model=with_router_weights(config.model))


_EVEN_STAGES: Mapping[str, Any] = {
    "num_virtual_stages_per_pipeline_rank": None,
    "num_layers_per_virtual_pipeline_stage": None,
    "pipeline_model_parallel_layout": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "mtp_standalone": False,
    "microbatch_group_size_per_virtual_pipeline_stage": None,
}
"""Flags of stages with equal numbers of layers."""


def has_uneven_stages(config: RunConfig) -> bool:
    """Tell whether the flags of a run say how many layers stages have."""
    parallel = config.parallel
    given = {name: value for name, value in _EVEN_STAGES.items() if name.startswith(("pipeline", "decoder", "account"))}
    return any(getattr(parallel, name) != value for name, value in given.items())


def is_even(model: ModelConfig, stages: int) -> bool:
    """Tell whether equal numbers of layers are about equal work: not those with halves of different kinds."""
    return model.num_layers % stages == 0 and len({layer.kinds for layer in model.layers}) == 1


def _layout_of(config: RunConfig) -> Layout | None:
    """Return the layout that the flags of a run describe, or None if its layers do not divide."""
    try:
        return Layout.of(config)
    except ConfigurationError:
        return None


def _recomputing(config: RunConfig, recompute: Recompute) -> dict[str, Any]:
    """Return the flags of a recomputation, of each layer alone if it is full."""
    training, full = config.training, recompute == "full"
    modules = training.recompute_modules if recompute == "selective" else type(training).recompute_modules
    return {
        "recompute_granularity": None if recompute == "none" else recompute,
        "recompute_method": "uniform" if full else None,
        "recompute_num_layers": 1 if full else None,
        "recompute_modules": modules,
    }


def to_search(config: RunConfig, keep: Collection[str]) -> RunConfig:
    """Return a run from which a search begins: whatever messages can do so run beside computation, and stages have
    equal numbers of layers unless `keep` has both of their axes."""
    own = Layout.of(config) if keep else None
    changed: dict[str, Any] = {
        "overlap_grad_reduce": True,
        "overlap_param_gather": config.parallel.zero_stage > 0,
        "align_grad_reduce": True,
        "num_distributed_optimizer_instances": 1,
        "ddp_bucket_size": None,
        "microbatch_group_size_per_virtual_pipeline_stage": None,
    }
    if not {"pipeline", "chunks"} <= set(keep):
        changed |= _EVEN_STAGES
        if own is not None and own.chunks > 1:
            changed["num_virtual_stages_per_pipeline_rank"] = own.chunks
    training = replace(config.training, **_recomputing(config, config.training.recompute_granularity or "none"))
    return replace(config, parallel=replace(config.parallel, **changed), training=training)


AXES = tuple(each.name for each in fields(Layout))
"""Names of what a search chooses."""


def layouts(
    config: RunConfig, gpus: int, keep: Collection[str] = (), *, whole_samples: bool = False
) -> Iterator[Layout]:
    """Yield the layouts whose sizes divide each other; `validate` may still refuse some of them.

    Those with ZeRO stage 1 stand for all stages, unless `keep` says that the flags' stage stays.

    Args:
        config: has a global batch size.
        keep: axes that stay as the flags have them.
        whole_samples: leave out context-parallel ranks.
    """
    own = Layout.of(config) if keep else None
    for tensor, sequence, context in _splits(config, gpus, whole_samples=whole_samples):
        for pipeline in divisors(gpus // (tensor * context)):
            samples = _samples(config, gpus // (tensor * context * pipeline))
            if pipeline > config.model.num_layers or not samples:
                continue
            schedules = _schedules(config.model.num_layers, pipeline)
            experts = _expert_sizes(config, tensor, gpus // pipeline)
            for (schedule, chunks), sizes, recompute, samples_each in product(schedules, experts, RECOMPUTE, samples):
                found = Layout(
                    *(tensor, sequence, pipeline, chunks, schedule, context, *sizes), 1, recompute, samples_each
                )
                if own is None or all(getattr(found, axis) == getattr(own, axis) for axis in keep if axis != "zero"):
                    yield found


def _splits(config: RunConfig, gpus: int, *, whole_samples: bool) -> Iterator[tuple[int, bool, int]]:
    """Yield tensor-parallel sizes, whether these ranks also split sequences, and context-parallel sizes."""
    model, length = config.model, config.data.seq_length
    for tensor in divisors(gpus):
        if uneven_widths(replace(model, moe_ffn_hidden_size=tensor), tensor):  # experts need not be split
            continue
        for sequence in [False] if tensor == 1 else [True] if model.num_experts else [True, False]:
            for context in [1] if whole_samples else divisors(gpus // tensor):
                parts = (tensor if sequence else 1) * (2 * context if context > 1 else 1)
                if length % parts == 0:
                    yield tensor, sequence, context


def _samples(config: RunConfig, copies: int) -> list[int]:
    """Return the sizes of a micro-batch that are tried: powers of two, and that of the flags."""
    batch, own = config.training.global_batch_size or 0, config.training.micro_batch_size
    powers = [2**power for power in range(_MOST_SAMPLES.bit_length())]
    return [] if batch % copies else [each for each in {*powers, own} if batch // copies % each == 0]


@cache
def divisors(number: int) -> list[int]:
    """Return the divisors of a number in ascending order."""
    return [each for each in range(1, number + 1) if number % each == 0]


@cache
def _schedules(layers: int, ranks: int) -> list[tuple[ScheduleName, int]]:
    """Return the schedules of a pipeline with their stages per rank. GPipe takes as long as 1F1B, and more memory."""
    if ranks == 1:
        return [("1f1b", 1)]
    found: list[tuple[ScheduleName, int]] = [("1f1b", 1), ("zb-h1", 1)]
    even = layers % ranks == 0
    chunks = divisors(layers // ranks) if even else [each for each in _UNEVEN_CHUNKS if each * ranks <= layers]
    found += [("interleaved-1f1b", each) for each in chunks if each > 1]
    return [*found, ("zb-v", 2)] if 2 in chunks else found


def _expert_sizes(config: RunConfig, tensor: int, ranks: int) -> list[tuple[int, int]]:
    """Return pairs of the ranks over which experts are spread and of those that share one."""
    model = config.model
    if model.num_experts is None:
        return [(0, tensor)]
    shared = sorted({1, tensor})
    return [
        (expert, each)
        for expert in divisors(model.num_experts)
        for each in shared
        if ranks % (expert * each) == 0 and model.expert_ffn_size % each == 0
    ]


def require_batch(config: RunConfig) -> None:
    """Raise ConfigurationError if the batch would depend on the layout."""
    if config.training.global_batch_size is None:
        raise ConfigurationError("--global-batch-size is missing: a plan compares layouts of the same batch")
