"""Options of the weight updates: the optimizer, the learning-rate schedule, clipping, weight decay."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from megalite.config.fields import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Share,
    ShareBelowOne,
    ShareInside,
    at_most,
    flag_of,
    needs,
)
from megalite.config.training import TrainingConfig


@dataclass(frozen=True)
class RuleFlags:
    """Flags that an update rule reads and other rules may not read.

    Attributes:
        prefixes: prefixes of the fields that the rule reads.
        squares: true if it keeps an average of squared gradients, in --exp-avg-sq-dtype.
        eight_bits: true if its averages may be kept in 8 bits.
        remainders: true if it may keep master weights as remainders.
        plain: true if megalite's plain operations are all that it has, with all that it keeps in fp32.
    """

    prefixes: tuple[str, ...]
    squares: bool = True
    eight_bits: bool = True
    remainders: bool = True
    plain: bool = False


RULE_FLAGS: Mapping[str, RuleFlags] = {
    "adam": RuleFlags(("adam_",)),
    "sgd": RuleFlags(("sgd_",), squares=False),
    "muon": RuleFlags(("muon_", "adam_"), eight_bits=False, remainders=False),  # Adam updates what is not a matrix
    "lars": RuleFlags(("lars_",), eight_bits=False, remainders=False, plain=True),
    "lamb": RuleFlags(("adam_",), eight_bits=False, remainders=False, plain=True),
    "lion": RuleFlags(("lion_",), eight_bits=False, remainders=False, plain=True),
    "adafactor": RuleFlags(("adafactor_",), eight_bits=False, remainders=False, plain=True),
}
"""The choices of --optimizer."""
_EIGHT_BITS = ("int8", "fp8")
_LEAST_EPSILON = 1e-12


@dataclass(frozen=True)
class OptimizerConfig:
    """Options of the weight updates. An iteration of the schedule counts as one global batch of samples."""

    lr: NonNegativeFloat
    """Highest learning rate; with noam, the factor of its formula."""
    optimizer: Literal["adam", "sgd", "muon", "lars", "lamb", "lion", "adafactor"] = "adam"
    """adam (with decoupled weight decay), sgd, muon (Muon for the matrices of the layers, adam for the rest), lars and
    lamb (sgd and adam for large batches), lion, or adafactor (docs/optimizer.md)."""
    optimizer_backend: Literal["auto", "torch", "megalite", "apex"] = "auto"
    """Implementation of adam and sgd: torch's fused kernels, megalite's (Triton or plain operations, by --kernels), or
    apex's. auto: megalite's on GPUs with Triton; otherwise torch's if they support the dtypes, or megalite's."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at and after the end of the decay."""
    decoupled_lr: NonNegativeFloat | None = None
    """Learning rate (lr) of the word embedding and the output layer; unset: lr."""
    decoupled_min_lr: NonNegativeFloat | None = None
    """Minimum learning rate of the same two; unset: min-lr."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD", "noam"] = "linear"
    """Shape of the decay after the warm-up; WSD: warm-up, stable, decay; noam: lr / sqrt(hidden-size * step)."""
    lr_decay_iters: PositiveInt | None = None
    """Iterations until min-lr is reached; unset: all of the run."""
    lr_decay_samples: PositiveInt | None = None
    """The same in samples, for runs with train-samples."""
    lr_warmup_iters: NonNegativeInt = 0
    """Iterations of linear warm-up."""
    lr_warmup_samples: NonNegativeInt = 0
    """The same in samples, for runs with train-samples."""
    lr_warmup_fraction: Share | None = None
    """Warm-up as a share of the decay's length."""
    lr_warmup_init: NonNegativeFloat = 0.0
    """Learning rate at the start of the warm-up."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of the last phase of WSD."""
    lr_wsd_decay_iters: PositiveInt | None = None
    """Iterations of the last phase of WSD."""
    lr_wsd_decay_samples: PositiveInt | None = None
    """The same in samples, for runs with train-samples."""
    lr_scaling_rule: Literal["linear", "sqrt"] | None = None
    """Multiply learning rates by global-batch-size / lr-scaling-base-batch-size, or by its square root."""
    lr_scaling_base_batch_size: PositiveInt | None = None
    """Global batch size for which the learning rates were chosen."""
    weight_decay: NonNegativeFloat = 0.01
    """Weight decay of matrices (biases and norms have none)."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the rise of weight decay over the run; constant: always weight-decay."""
    start_weight_decay: NonNegativeFloat | None = None
    """Weight decay at the start of the run, if it rises."""
    end_weight_decay: NonNegativeFloat | None = None
    """Weight decay at the end of the run, if it rises."""
    clip_grad: NonNegativeFloat = 1.0
    """Largest global norm of the gradient; 0: no clipping."""
    adam_beta1: ShareBelowOne = 0.9
    """Adam's decay of the first moment."""
    adam_beta2: ShareBelowOne = 0.999
    """Adam's decay of the second moment."""
    adam_eps: PositiveFloat = 1e-8
    """Number added to the root of Adam's second moment."""
    sgd_momentum: ShareBelowOne = 0.9
    """Momentum of sgd."""
    muon_momentum: ShareBelowOne = 0.9
    """Momentum of muon."""
    muon_nesterov: bool = False
    """Use Nesterov momentum for muon."""
    muon_split_qkv: bool = True
    """Let Muon orthogonalize queries, gates, keys and values of attention apart, instead of all as one matrix."""
    muon_split_qkv_per_head: bool = False
    """Let Muon orthogonalize the queries, keys and values of each head by themselves (GLM-5's Muon Split,
    arXiv:2602.15763), also the gates of attention and the matrices from latents, instead of those of all heads as one
    matrix."""
    muon_num_ns_steps: Annotated[PositiveInt, at_most(100)] = 5
    """Number of Newton-Schulz steps with which Muon orthogonalizes an update."""
    muon_coefficient_type: Literal["simple", "quintic", "polar_express"] = "quintic"
    """Coefficients of these steps: one set, five sets in turn, or eight sets, of which the last repeats."""
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = "spectral"
    """Multiply updates [rows, columns] by the root of max(rows, columns), rows / columns, or max(1, rows / columns)."""
    muon_extra_scale_factor: PositiveFloat = 1.0
    """Additional factor of Muon's updates; 0.2 with spectral gives them the size of adam's."""
    muon_fp32_matmul_prec: Literal["medium", "high"] = "medium"
    """Precision of the Newton-Schulz steps: bf16 (medium) or fp32 (high)."""
    lars_momentum: ShareBelowOne = 0.9
    """Momentum of lars."""
    lars_coefficient: PositiveFloat = 0.001
    """Factor of the ratio of norms by which lars multiplies the learning rate of a matrix."""
    lion_beta1: ShareBelowOne = 0.95
    """Share of the momentum in the sum with the gradient whose sign is lion's update."""
    lion_beta2: ShareBelowOne = 0.98
    """Decay of lion's momentum."""
    adafactor_eps: PositiveFloat = 1e-30
    """Number that adafactor adds to squared gradients."""
    ema_decay: ShareInside | None = None
    """Keep a mean of the weights over the steps: mean = ema-decay * mean + (1 - ema-decay) * weight, from the initial
    weights on, in fp32 or wider. Checkpoints have it, and --ema of the tools takes it."""
    use_precision_aware_optimizer: bool = False
    """Let the optimizer use the four dtypes that follow; needs bf16 or fp16."""
    main_grads_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of the buffers in which gradients are added up and reduced."""
    main_params_dtype: Literal["fp32", "fp16"] = "fp32"
    """Dtype of the master weights."""
    store_param_remainders: bool = False
    """Keep each fp32 master as the 16 bits that its bf16 parameter lacks, bit for bit; needs bf16."""
    exp_avg_dtype: Literal["fp32", "bf16", "fp16", "int8", "fp8"] = "fp32"
    """Dtype of Adam's average of gradients, or of sgd's and muon's momentum. int8 and fp8: one scale per block."""
    exp_avg_sq_dtype: Literal["fp32", "bf16", "int8", "fp8"] = "fp32"
    """Dtype of Adam's average of their squares. int8 and fp8: of its root, one scale per block."""

    @property
    def narrow(self) -> dict[str, str]:
        """Fields of the precision-aware optimizer with a dtype smaller than fp32, and their dtypes."""
        names = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
        return {name: value for name in names if (value := getattr(self, name)) != "fp32"}

    def learning_rate_multiplier(self, global_batch_size: int) -> float:
        """Return the factor of --lr-scaling-rule for all learning rates except --lr-warmup-init."""
        if self.lr_scaling_rule is None or self.lr_scaling_base_batch_size is None:
            return 1.0
        ratio = global_batch_size / self.lr_scaling_base_batch_size
        return ratio if self.lr_scaling_rule == "linear" else math.sqrt(ratio)


def noam_maximum(factor: float, hidden_size: int, warmup_steps: float) -> float:
    """Return the learning rate at the end of noam's warm-up (Vaswani et al. 2017, equation 3, step = warmup_steps)."""
    return factor / math.sqrt(hidden_size * warmup_steps)


def optimizer_problems(optimizer: OptimizerConfig, training: TrainingConfig) -> Iterator[str]:
    """Yield a line for each relation that does not hold, except those of learning rates and weight decay."""
    for prefix in dict.fromkeys(prefix for row in RULE_FLAGS.values() for prefix in row.prefixes):
        rules = [name for name, row in RULE_FLAGS.items() if prefix in row.prefixes]
        if optimizer.optimizer not in rules:
            yield from needs(optimizer, f"{prefix}*", f"--optimizer {' or '.join(rules)}")
    kind, steps = optimizer.muon_coefficient_type, optimizer.muon_num_ns_steps
    if (kind == "quintic" and steps % 5) or (kind == "polar_express" and steps < 8):
        wanted = "a multiple of 5" if kind == "quintic" else "at least 8"
        yield f"--muon-num-ns-steps {steps} does not fit --muon-coefficient-type {kind}: give {wanted}"
    if optimizer.muon_split_qkv_per_head and not optimizer.muon_split_qkv:
        yield "--muon-split-qkv-per-head and --no-muon-split-qkv (--muon-no-split-qkv) exclude each other: choose one"
    yield from _what_is_kept(optimizer, training)


def _what_is_kept(optimizer: OptimizerConfig, training: TrainingConfig) -> Iterator[str]:
    """Refuse optimizer state that the back end does not support, or not in this precision."""
    backend = optimizer.optimizer_backend
    if RULE_FLAGS[optimizer.optimizer].plain:
        yield from _plain(optimizer)
        return
    if backend == "apex" and training.fp64:
        yield "--optimizer-backend apex does not support --fp64: leave one out"
    for name, dtype in optimizer.narrow.items():
        flag = f"{flag_of(name)} {dtype}"
        if not optimizer.use_precision_aware_optimizer:
            yield f"{flag} needs --use-precision-aware-optimizer"
        elif not (training.bf16 or training.fp16):
            yield f"{flag} needs --bf16 or --fp16"
        if name != "main_grads_dtype" and backend in ("torch", "apex"):
            yield f"{flag} needs --optimizer-backend megalite (or auto), not {backend}"
    if optimizer.optimizer == "sgd" and not optimizer.sgd_momentum and "exp_avg_dtype" in optimizer.narrow:
        yield f"--exp-avg-dtype {optimizer.exp_avg_dtype}: --sgd-momentum 0 has no average"
    name, row = optimizer.optimizer, RULE_FLAGS[optimizer.optimizer]
    if not row.squares and "exp_avg_sq_dtype" in optimizer.narrow:
        yield f"--exp-avg-sq-dtype {optimizer.exp_avg_sq_dtype}: --optimizer {name} has no average of squares"
    if not row.eight_bits and optimizer.exp_avg_dtype in _EIGHT_BITS:
        others = " and ".join(other for other, its in RULE_FLAGS.items() if its.eight_bits)
        yield f"--exp-avg-dtype {optimizer.exp_avg_dtype} is for {others} only: {name}'s momentum cannot have 8 bits"
    if optimizer.exp_avg_sq_dtype in _EIGHT_BITS and optimizer.adam_eps < _LEAST_EPSILON:
        dtype = optimizer.exp_avg_sq_dtype
        yield (
            f"--adam-eps {optimizer.adam_eps} is too small for --exp-avg-sq-dtype {dtype}, which rounds averages with "
            f"a root below 3e-14 to zero: give {_LEAST_EPSILON} or more"
        )
    if optimizer.store_param_remainders:
        yield from _remainders(optimizer, training)
    if training.fp16 and optimizer.main_params_dtype == "fp16":
        yield "--main-params-dtype fp16 with --fp16 has no more precise weights: use --bf16, or keep fp32"


def _plain(optimizer: OptimizerConfig) -> Iterator[str]:
    rule, backend = optimizer.optimizer, optimizer.optimizer_backend
    *others, last = (name for name, row in RULE_FLAGS.items() if not row.plain)
    names = ", ".join(others)
    if backend not in ("auto", "megalite"):
        yield f"--optimizer-backend {backend} is for {names} and {last}: leave it out with --optimizer {rule}"
    if optimizer.use_precision_aware_optimizer or optimizer.narrow or optimizer.store_param_remainders:
        given = "use_precision_aware_optimizer", "store_param_remainders", *optimizer.narrow
        flags = ", ".join(flag_of(name) for name in given if name in optimizer.narrow or getattr(optimizer, name))
        yield f"{flags}: --optimizer {rule} keeps everything in fp32; use {names} or {last}, or drop it"


def _remainders(optimizer: OptimizerConfig, training: TrainingConfig) -> Iterator[str]:
    flag = "--store-param-remainders"
    if not training.bf16:
        yield f"{flag} needs --bf16: it stores the bits of fp32 masters that bf16 parameters do not have"
    if optimizer.main_params_dtype != "fp32":
        yield f"{flag} stores fp32 masters, not --main-params-dtype {optimizer.main_params_dtype}: drop one"
    if not RULE_FLAGS[optimizer.optimizer].remainders:
        yield f"{flag} needs --optimizer {' or '.join(name for name, row in RULE_FLAGS.items() if row.remainders)}"
    if optimizer.optimizer_backend in ("torch", "apex"):
        yield f"{flag} needs --optimizer-backend megalite (or auto), not {optimizer.optimizer_backend}"
