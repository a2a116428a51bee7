"""The configuration of a program's run: its own settings, and any others under the names of flags."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

from megalite.config import RunConfig
from megalite.config.checkpoint import CheckpointConfig
from megalite.config.data import DataConfig
from megalite.config.model import ModelConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.config.pipeline_layout import with_stages_of_pattern
from megalite.config.prediction import with_depths_of_pattern
from megalite.config.run import TaskConfig, fields_by_name, fits, section_types
from megalite.config.training import TrainingConfig
from megalite.config.validate import validate, validate_task
from megalite.config.validate_division import least_micro_batches
from megalite.config.validate_synchronization import with_sites
from megalite.data.sample_source import SampleSource
from megalite.errors import ConfigurationError, MegaliteError
from megalite.library.arguments import elsewhere, errors_in_arguments, unknown
from megalite.library.settings import Layout, Optimizer, no_optimizer
from megalite.parallel.mesh import ParallelMesh
from megalite.tasks.module_task import ModuleOptions
from megalite.training.factors import check_factors
from megalite.training.task import ONLY, Task

Precision = Literal["fp32", "bf16", "fp16", "fp64"]

_TAKEN = {
    "parallel": "data_parallel_shares ddp_bucket_size grad_reduce_in_bf16 overlap_p2p_communication align_grad_reduce "
    "cp_comm_type microbatch_group_size_per_virtual_pipeline_stage expert_tensor_parallel_size distributed_backend "
    "distributed_timeout_minutes",
    "training": "eval_iters eval_interval eval_global_batch_size exit_interval exit_duration_in_mins loss_scale "
    "initial_loss_scale min_loss_scale loss_scale_window hysteresis rerun_mode deterministic_mode "
    "empty_unused_memory_level manual_gc manual_gc_interval manual_gc_eval",
    "kernels": "kernels",
}
"""Settings of these sections that any model takes. Of other sections it takes all, but for those of `_REFUSED`."""
_OF_A_GPT = {
    "training": "recompute_granularity recompute_modules recompute_method recompute_num_layers mlp_chunks_for_training",
    "kernels": "persist_layer_norm bias_dropout_fusion bias_gelu_fusion bias_swiglu_fusion rope_fusion "
    "cross_entropy_loss_fusion fused_linear_cross_entropy",
}
_REFUSED = {
    "checkpoint": "save resume moe_use_upcycling resize_vocabulary use_checkpoint_args "
    "use_checkpoint_opt_param_scheduler",
    "optimizer": "optimizer lr",
    "logging": "log_validation_ppl_to_tensorboard sample_interval sample_prompts sample_tokens",
    "synchronization": "local_update local_update_period local_update_warmup_iters local_update_fragments "
    "local_update_delay local_update_mixing outer_optimizer outer_lr outer_momentum elastic_rate asynchronous "
    "num_servers max_staleness backup_workers",
    "recovery": "spare_nodes elastic elastic_replan survivors_finish_step",
    "corruption": "check_weight_hash_across_dp_replicas_interval rerun_on_replica_interval "
    "check_gradient_sync_interval",
}


def sections_of(
    optimizer: Optimizer | Mapping[str, Optimizer],
    layout: Layout,
    *,
    precision: Precision,
    micro_batch_size: int,
    global_batch_size: int | None,
    seed: int,
    save: str | Path | None,
    world_size: int,
) -> dict[str, Any]:
    """Return the sections of a configuration that any model has.

    The first of several optimizers stands for them. Raises ConfigurationError for an unknown precision, or for what is
    no optimizer of megalite.
    """
    first: Any = next(iter(optimizer.values()), {}) if isinstance(optimizer, Mapping) else optimizer
    if not isinstance(first, Optimizer):
        raise no_optimizer(first)
    if precision not in get_args(Precision):
        raise ConfigurationError(f"precision={precision!r}: choose one of {', '.join(get_args(Precision))}")
    return {
        "parallel": layout.config(world_size),
        "optimizer": first.config(),
        "training": TrainingConfig(
            micro_batch_size=micro_batch_size,
            global_batch_size=global_batch_size,
            seed=seed,
            eval_iters=0,
            bf16=precision == "bf16",
            fp16=precision == "fp16",
            fp64=precision == "fp64",
        ),
        "checkpoint": CheckpointConfig() if save is None else CheckpointConfig(save=str(save), resume="auto"),
    }


def sections_of_gpt(model: ModelConfig, seq_length: int | None, options: ModuleOptions) -> dict[str, Any]:
    """Return the sections that only a GPT has. Raises ConfigurationError for options that are for modules."""
    plain = ModuleOptions(options.stages, options.loss, options.count)
    if options.optimizers:
        raise ConfigurationError("several optimizers are for modules, not for a GPTConfig: give one")
    if given := [each.name for each in fields(plain) if getattr(options, each.name) != getattr(plain, each.name)]:
        raise ConfigurationError(f"{', '.join(given)}: these are for modules, not for a GPTConfig")
    if seq_length is None:
        raise ConfigurationError("give Trainer(seq_length=...), the tokens per sample of the GPT")
    for name in (each.name for each in fields(model)):
        value, kind = getattr(model, name), fields_by_name()[name].kind
        if not fits(value, kind):
            wanted = kind.__name__ if isinstance(kind, type) else kind
            raise ConfigurationError(f"GPTConfig({name}={value!r}): the type of this option is {wanted}")
    # The samples come from the program.
    return {"model": model, "data": DataConfig(seq_length=seq_length, tokenizer_type="NullTokenizer", mock_data=True)}


def configured(
    sections: Mapping[str, Any],
    settings: Mapping[str, Any],
    valid: SampleSource | None,
    world_size: int,
    node_ranks: int | None = None,
    own: Collection[str] = (),
    optimizers: Mapping[str, OptimizerConfig] = MappingProxyType({}),
) -> TaskConfig:
    """Return the configuration of a run, with `settings` in its sections. Raises ConfigurationError.

    Args:
        sections: the sections that other arguments of `Trainer` have set.
        settings: fields of a run's configuration.
        valid: data of evaluations.
        world_size: the number of ranks.
        node_ranks: the number of ranks on this rank's node; None: it is not known.
        own: names of the other arguments of `Trainer`, one of which may be meant by an unknown name.
        optimizers: the hyperparameters by name, if there are several.
    """
    of_gpt = "model" in sections
    if not of_gpt:  # a layer gets its mask when it runs, and a ring takes none
        sections = {**sections, "parallel": replace(sections["parallel"], cp_comm_type=("all_gather",))}
    config = RunConfig(**sections) if of_gpt else TaskConfig(**sections)
    config = _with_settings(config, settings, own)
    if isinstance(config, RunConfig):
        model, parallel = with_stages_of_pattern(with_depths_of_pattern(config.model), config.parallel)
        config = replace(config, model=model, parallel=parallel)
    training = config.training
    samples = training.micro_batch_size * least_micro_batches(config.parallel, world_size)
    batch, evaluation = training.global_batch_size or samples, training.eval_global_batch_size or samples
    training = replace(training, global_batch_size=batch, eval_global_batch_size=evaluation)
    if valid is not None and not training.eval_iters:
        training = replace(training, eval_iters=evaluation_batches(valid, evaluation))
    config = with_sites(replace(config, training=training), world_size, node_ranks)
    if config.checkpoint.save is None and config.checkpoint.save_interval is not None:
        interval = config.checkpoint.save_interval
        raise ConfigurationError(f"save_interval={interval} needs Trainer(save=...), the run directory")
    if not isinstance(config, RunConfig):
        if (ways := config.parallel.cp_comm_type) not in (("p2p",), ("all_gather",), ("allgather",), ("a2a",)):
            raise ConfigurationError(f"cp_comm_type={ways}: of modules, it is one of p2p, all_gather and a2a for all")
        if "cp_comm_type" in settings and config.parallel.context_parallel_size == 1:
            raise ConfigurationError(f"cp_comm_type={ways} changes nothing without Layout(cp=...)")
    if optimizers:
        _check_several(config, settings)
    with errors_in_arguments():
        if isinstance(config, RunConfig):
            # The program gives the length: any that no other option is too long for.
            validate(replace(config, training=replace(training, train_iters=2**30)), world_size)
        else:
            for each in optimizers.values() or (config.optimizer,):
                validate_task(replace(config, optimizer=each), world_size)
    return config


def several_optimizers(optimizer: Optimizer | Mapping[str, Optimizer]) -> dict[str, OptimizerConfig]:
    """Return the hyperparameters of several optimizers by name; nothing for a single one. Raises ConfigurationError."""
    if not isinstance(optimizer, Mapping):
        return {}
    for name, each in optimizer.items():
        if not isinstance(name, str) or not name:
            raise ConfigurationError(f"optimizer={{{name!r}: ...}}: give patterns of names of parameters")
        if not isinstance(each, Optimizer):
            raise no_optimizer(each)
    return {name: each.config() for name, each in optimizer.items()}


def with_factors(
    make_task: Callable[[ParallelMesh], Task], optimizer: Optimizer | Mapping[str, Optimizer]
) -> Callable[[ParallelMesh], Task]:
    """Return a function that makes the task of a run with the schedules that are functions of the step."""
    each = optimizer if isinstance(optimizer, Mapping) else {ONLY: optimizer}
    factors = {name: one.schedule for name, one in each.items() if callable(one.schedule)}
    if not factors:
        return make_task

    def make(mesh: ParallelMesh) -> Task:
        check_factors(factors, mesh)
        task = make_task(mesh)
        task.factors = factors
        return task

    return make


def _check_several(config: TaskConfig, settings: Mapping[str, Any]) -> None:
    """Raise ConfigurationError for what several optimizers cannot have."""
    if config.parallel.pipeline_model_parallel_size > 1:
        raise ConfigurationError("several optimizers update models of one stage: leave out Layout(pp=...)")
    if not config.synchronization.is_plain:
        raise ConfigurationError(
            "several optimizers reduce gradients in the plain way: leave out what compresses them, or "
            "drop_stragglers_after"
        )
    for name in settings:
        if fields_by_name()[name].section == "optimizer":
            raise ConfigurationError(f"{name}=... is of a single optimizer: give it to each of several")


def _with_settings(config: TaskConfig, settings: Mapping[str, Any], own: Collection[str]) -> TaskConfig:
    """Return the configuration with these fields. Raises ConfigurationError for one that `Trainer` does not take."""
    taken = _taken(of_gpt=isinstance(config, RunConfig))
    for name, value in settings.items():
        if name not in fields_by_name():
            raise unknown("Trainer", name, [*own, *taken])
        if name not in taken:
            where = elsewhere(name)
            why = f"is {where} here" if where else "changes nothing here: docs/library.md lists what Trainer takes"
            raise ConfigurationError(f"{name}={value!r} {why}")
        place = fields_by_name()[name]
        if not fits(value, place.kind):
            raise ConfigurationError(f"{name}={value!r}: the type of this setting is {place.kind}")
        section = replace(getattr(config, place.section), **{name: value})
        config = replace(config, **{place.section: section})
    return config


def _taken(*, of_gpt: bool) -> set[str]:
    """Return the names of the settings that a run takes under the names of flags."""
    names = set[str]()
    sections = {each.name for each in fields(RunConfig if of_gpt else TaskConfig)} - {"model", "data"}
    for section, kind in section_types().items():
        if section not in sections:
            continue
        all_names = {entry.name for entry in fields(kind)}
        some = " ".join(each[section] for each in (_TAKEN, _OF_A_GPT if of_gpt else {}) if section in each).split()
        names |= (all_names & set(some) if section in _TAKEN else all_names) - set(_REFUSED.get(section, "").split())
    return names


def evaluation_batches(source: SampleSource, batch_size: int, eval_iters: int = 0) -> int:
    """Return the number of batches of an evaluation of a dataset, the last of which may be smaller.

    Without a length it is `eval_iters`. Raises ConfigurationError if that is not given either.
    """
    if source.length is not None:
        return -(-source.length // batch_size)
    if not eval_iters:
        raise ConfigurationError("the dataset of evaluations has no length: give Trainer(eval_iters=...)")
    return eval_iters


def check_names_of_optimizers(names: Collection[str], only: str | Collection[str] | None) -> list[str]:
    """Return the names of the optimizers that a step updates. Raises ConfigurationError if the run has no such ones.

    `names`: those of the run; empty if it has a single one.
    """
    given = [only] if isinstance(only, str) else list(only or ())
    if only is not None and (not given or not set(given) <= set(names)):
        has = f"the optimizers are {', '.join(names)}" if names else "the run has a single optimizer"
        raise ConfigurationError(f"run.step(only={only!r}): {has}")
    return given


def check_numbered(batch: object) -> None:
    """Raise MegaliteError if a batch is not a list of micro-batches, whose samples have numbers."""
    parts = list(batch) if isinstance(batch, list | tuple) else [batch]
    other = next((part for part in parts if not hasattr(part, "sample_ids")), None)
    if other is not None or not parts or not isinstance(batch, list | tuple):
        raise MegaliteError(
            f"run.step(batch) takes what run.batches() yields, a list of micro-batches whose samples have numbers, and "
            f"was given {'an empty ' * (not parts)}{type(batch).__name__}: give the data as Trainer(dataset=...), then "
            "call run.step(), or run.step(batch) for each batch of run.batches()"
        )
