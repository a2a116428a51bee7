"""The relations between the flags of update rules, their back ends and the precision of what they keep."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from megalite.config.optimizer import RULE_FLAGS, OptimizerConfig
from megalite.config.run import RunConfig

_EIGHT_BITS = ("int8", "fp8")
_LEAST_EPSILON = 1e-12


def optimizer_problems(config: RunConfig) -> Iterator[str]:
    """One line for each relation that does not hold."""
    yield from _idle(config.optimizer)
    yield from _muon(config.optimizer)
    yield from _what_is_kept(config)


def _idle(optimizer: OptimizerConfig) -> Iterator[str]:
    """Flags of an update rule that is not chosen."""
    for prefix in dict.fromkeys(prefix for row in RULE_FLAGS.values() for prefix in row.prefixes):
        rules = [name for name, row in RULE_FLAGS.items() if prefix in row.prefixes]
        for field in fields(optimizer):
            idle = field.name.startswith(prefix) and optimizer.optimizer not in rules
            if idle and getattr(optimizer, field.name) != field.default:
                yield f"--{field.name.replace('_', '-')} needs --optimizer {' or '.join(rules)}"


def _muon(optimizer: OptimizerConfig) -> Iterator[str]:
    kind, steps = optimizer.muon_coefficient_type, optimizer.muon_num_ns_steps
    if (kind == "quintic" and steps % 5) or (kind == "polar_express" and steps < 8):
        wanted = "a multiple of 5" if kind == "quintic" else "at least 8"
        yield f"--muon-num-ns-steps {steps} cuts --muon-coefficient-type {kind} short: give {wanted}"


def _what_is_kept(config: RunConfig) -> Iterator[str]:
    """Refuse state that the back end cannot keep, or not in this precision."""
    optimizer, training = config.optimizer, config.training
    backend = optimizer.optimizer_backend
    if backend == "apex" and training.fp64:
        yield "--optimizer-backend apex knows no --fp64: leave it out"
    for name, dtype in optimizer.narrow.items():
        flag = f"--{name.replace('_', '-')} {dtype}"
        if not optimizer.use_precision_aware_optimizer:
            yield f"{flag} needs --use-precision-aware-optimizer"
        elif not (training.bf16 or training.fp16):
            yield f"{flag} needs --bf16 or --fp16"
        if name != "main_grads_dtype" and backend in ("torch", "apex"):
            yield f"{flag} is kept by --optimizer-backend megalite (or auto), not by {backend}"
    if optimizer.optimizer == "sgd" and not optimizer.sgd_momentum and "exp_avg_dtype" in optimizer.narrow:
        yield f"--exp-avg-dtype {optimizer.exp_avg_dtype}: --sgd-momentum 0 keeps no average"
    name, row = optimizer.optimizer, RULE_FLAGS[optimizer.optimizer]
    if not row.squares and "exp_avg_sq_dtype" in optimizer.narrow:
        yield f"--exp-avg-sq-dtype {optimizer.exp_avg_sq_dtype}: --optimizer {name} keeps no squares"
    if not row.eight_bits and optimizer.exp_avg_dtype in _EIGHT_BITS:
        others = " and ".join(other for other, its in RULE_FLAGS.items() if its.eight_bits)
        yield f"--exp-avg-dtype {optimizer.exp_avg_dtype} is of {others}: {name}'s momentum is not in 8 bits"
    if optimizer.exp_avg_sq_dtype in _EIGHT_BITS and optimizer.adam_eps < _LEAST_EPSILON:
        dtype = optimizer.exp_avg_sq_dtype
        yield (
            f"--adam-eps {optimizer.adam_eps} with --exp-avg-sq-dtype {dtype}, where averages with a root below 3e-14 "
            f"are zeros; give {_LEAST_EPSILON} or more"
        )
    if optimizer.store_param_remainders:
        yield from _remainders(config)
    if training.fp16 and optimizer.main_params_dtype == "fp16":
        yield "--main-params-dtype fp16 leaves --fp16 no weights but its own: use --bf16, or keep fp32"


def _remainders(config: RunConfig) -> Iterator[str]:
    optimizer, flag = config.optimizer, "--store-param-remainders"
    if not config.training.bf16:
        yield f"{flag} needs --bf16: it is what bf16 parameters lack of fp32 masters"
    if optimizer.main_params_dtype != "fp32":
        yield f"{flag} is another way to keep fp32 masters than --main-params-dtype {optimizer.main_params_dtype}"
    if not RULE_FLAGS[optimizer.optimizer].remainders:
        yield f"{flag} needs --optimizer {' or '.join(name for name, row in RULE_FLAGS.items() if row.remainders)}"
    if optimizer.optimizer_backend in ("torch", "apex"):
        yield f"{flag} needs --optimizer-backend megalite (or auto), not {optimizer.optimizer_backend}"
