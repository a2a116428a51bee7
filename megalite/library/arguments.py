"""Words of flags and of other libraries as a program writes them: arguments of `Trainer`, `AdamW` and `Layout`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from megalite.config import foreign_flags, megatron_flags
from megalite.config.parallel import STRATEGIES
from megalite.config.run import fields_by_name
from megalite.config.yaml_file import nearest
from megalite.errors import CheckpointError, ConfigurationError

_OF_OPTIMIZERS = {
    "lr": "lr={}",
    "min-lr": "min_lr={}",
    "weight-decay": "weight_decay={}",
    "clip-grad": "clip_grad={}",
    "lr-decay-style": "schedule={}",
    "lr-decay-iters": "steps={}",
    "lr-warmup-iters": "warmup={}",
    "adam-beta1": "betas=({}, ...)",
    "adam-beta2": "betas=(..., {})",
    "adam-eps": "eps={}",
    "sgd-momentum": "momentum={}",
}
_PLACES = {flag: f"AdamW({argument})" for flag, argument in _OF_OPTIMIZERS.items()} | {
    "sgd-momentum": "SGD(momentum={})",
    "optimizer": "optimizer=megalite.AdamW(...)",
    "bf16": 'precision="bf16"',
    "fp16": 'precision="fp16"',
    "tensor-model-parallel-size": "Layout(tp={})",
    "pipeline-model-parallel-size": "Layout(pp={})",
    "context-parallel-size": "Layout(cp={})",
    "expert-model-parallel-size": "Layout(ep={})",
    "data-parallel-sharding-strategy": "Layout(zero={})",
    "num-distributed-optimizer-instances": "Layout(instances={})",
    "num-virtual-stages-per-pipeline-rank": "Layout(stages_per_rank={})",
    "pipeline-schedule": "Layout(schedule={})",
    "sequence-parallel": "Layout(sequence_parallel=True)",
    "overlap-grad-reduce": "Layout(overlap=True)",
    "recompute-granularity": "recompute=True",
    "train-iters": "run.train(steps={})",
    "train-samples": "run.train(epochs={})",
    "save": "Trainer(save={})",
    "compile": "torch.compile of the model",
}
"""Places where a program writes what a flag says; any other is an argument of `Trainer` with the flag's name."""
_ANSWERS = {
    "args": "each setting is an argument of its own, in docs/library.md",
    "batch_size": "micro_batch_size=..., the samples that a rank processes at once, and global_batch_size=...",
    "callbacks": "a loop of one's own: for batch in run.batches(): run.step(batch), and what should happen between",
    "compute_metrics": "metrics={name: function of outputs and a batch}",
    "criterion": "loss=..., a function of outputs and a batch",
    "data_collator": "collate=...",
    "dataloader": "dataset=..., which may be a DataLoader",
    "device": "no argument: each rank has the GPU of its number on the node, or the CPU without GPUs",
    "devices": "no argument: the launcher starts as many ranks (docs/launchers.md)",
    "accelerator": "no argument: each rank has the GPU of its number on the node, or the CPU without GPUs",
    "strategy": "layout=megalite.Layout(zero=...)",
    "epochs": "run.train(epochs=...)",
    "eval_dataset": "valid_dataset=...",
    "gradient_checkpointing": "recompute=True, or patterns of names of submodules",
    "logger": "save=..., where metrics.jsonl and TensorBoard's files are written; run.step returns each record",
    "loss_fn": "loss=..., a function of outputs and a batch",
    "lr_scheduler": 'AdamW(schedule="cosine", steps=..., warmup=...)',
    "max_epochs": "run.train(epochs=...)",
    "optimizers": "optimizer=...",
    "scheduler": 'AdamW(schedule="cosine", steps=..., warmup=...)',
    "steps": "run.train(steps=...)",
    "train_dataset": "dataset=...",
    "train_loader": "dataset=..., which may be a DataLoader",
} | {name: f"layout=megalite.Layout({name}=...)" for name in ("dp", "tp", "pp", "cp", "ep", "zero")}
"""Words of other libraries that have no flag, and what to write here."""
_ANSWERS_OF_OPTIMIZERS = {
    "beta1": "betas=(beta1, beta2)",
    "beta2": "betas=(beta1, beta2)",
    "alpha": "lr=...",
    "max_lr": "lr=..., the highest rate",
    "params": "no argument: Trainer has the parameters of the model",
    "total_steps": "steps=...",
    "num_training_steps": "steps=...",
    "T_max": "steps=...",
    "eta_min": "min_lr=...",
    "lr_lambda": "schedule=..., a function of the step",
    "fused": "not needed: fused kernels are the default",
    "foreach": "not needed: fused kernels are the default",
}
_STRATEGY = re.compile(rf"\b({'|'.join(STRATEGIES)})\b")
_FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]*)(?: (-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)(?![\w/]))?")


def in_arguments(message: str) -> str:
    """Return a message about flags in the words of a program: `--clip-grad -1.0` becomes `AdamW(clip_grad=-1.0)`."""
    return _FLAG.sub(lambda found: _argument(found[0], found[1], found[2]), message)


@contextmanager
def errors_in_arguments(**texts: str | None) -> Iterator[None]:
    """Let errors about flags speak of arguments. `texts`: by flag, a value that no pattern would find."""
    try:
        yield
    except (ConfigurationError, CheckpointError) as error:
        message = str(error)
        for name, value in texts.items():
            message = message.replace(f"--{name} {value}", _argument("", name, repr(value)))
        error.args = (in_arguments(message),)
        raise


def _argument(text: str, flag: str, value: str | None) -> str:
    name = flag.replace("-", "_")
    if flag in _PLACES:
        return _PLACES[flag].replace("{}", value or "...")
    return f"{name}={value or '...'}" if name in fields_by_name() else text


def elsewhere(name: str) -> str | None:
    """Return where a program writes a field of a run's configuration, if not as an argument of `Trainer`."""
    place = _PLACES.get(name.replace("_", "-"))
    return None if place is None else place.replace("{}", "...")


def unknown(owner: str, name: str, known: Collection[str]) -> ConfigurationError:
    """Return the error about an argument that `owner` does not have.

    Args:
        owner: the name of the class, as in `AdamW`.
        known: the names of its arguments.
    """
    of_optimizer = owner != "Trainer"
    answers = _ANSWERS_OF_OPTIMIZERS if of_optimizer else _ANSWERS
    given, flag = f"{owner}({name}=...)", name.replace("_", "-")
    if name in answers:
        return ConfigurationError(f"{given} is unknown, here {answers[name]}")
    for program, flags in foreign_flags.tables().items():
        if flag in flags:
            here = in_arguments(flags[flag]).replace("AdamW(", f"{owner}(" if of_optimizer else "AdamW(")
            if "Layout(zero=" in here:
                here = _STRATEGY.sub(lambda found: str(STRATEGIES.index(found[0])), here)
            return ConfigurationError(f"{given}: {name} is a setting of {program}, here {here}")
    note = megatron_flags.accepted().get(flag, ("", ""))[1] or megatron_flags.refusal(flag)
    if note and not of_optimizer:
        return ConfigurationError(f"{given}: {in_arguments(note)}")
    return ConfigurationError(f"{given} is unknown{nearest(name, known)}: docs/library.md lists what {owner} takes")
