"""Updates of weights: the optimizer, the learning-rate schedule, clipping, weight decay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RuleFlags:
    """Flags that an update rule reads, of those that not all rules do.

    Attributes:
        prefixes: of the fields that it reads.
        squares: it keeps an average of squared gradients, of --exp-avg-sq-dtype.
        eight_bits: its averages may be kept in 8 bits.
        remainders: it may keep masters as remainders.
    """

    prefixes: tuple[str, ...]
    squares: bool = True
    eight_bits: bool = True
    remainders: bool = True


RULE_FLAGS: Mapping[str, RuleFlags] = {
    "adam": RuleFlags(("adam_",)),
    "sgd": RuleFlags(("sgd_",), squares=False),
    "muon": RuleFlags(("muon_", "adam_"), eight_bits=False, remainders=False),  # what is no matrix is adam's
}
"""The choices of --optimizer."""


@dataclass(frozen=True)
class OptimizerConfig:
    """The update rule. Iterations of the schedule count as that many global batches of samples."""

    lr: float
    """Highest learning rate; under noam the factor of its formula."""
    optimizer: Literal["adam", "sgd", "muon"] = "adam"
    """adam (with decoupled weight decay), sgd, or muon: Muon for the matrices of the layers, adam for the rest."""
    optimizer_backend: Literal["auto", "torch", "megalite", "apex"] = "auto"
    """Whose adam and sgd: torch's fused kernels, megalite's (Triton's or plain operations, by --kernels), or apex's.
    auto: megalite's on GPUs with Triton; else torch's where they can keep what is to be kept, or megalite's."""
    min_lr: float = 0.0
    """Learning rate at and after the end of the decay."""
    decoupled_lr: float | None = None
    """Lr of the word embedding and the output layer; unset: that of the rest."""
    decoupled_min_lr: float | None = None
    """Their min-lr; unset: that of the rest."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD", "noam"] = "linear"
    """Shape of the decay after the warm-up; WSD: warm-up, stable, decay; noam: lr / sqrt(hidden-size * step)."""
    lr_decay_iters: int | None = None
    """Iterations until min-lr is reached; unset: the whole run."""
    lr_decay_samples: int | None = None
    """The same in samples, for runs with train-samples."""
    lr_warmup_iters: int = 0
    """Iterations of linear warm-up."""
    lr_warmup_samples: int = 0
    """The same in samples, for runs with train-samples."""
    lr_warmup_fraction: float | None = None
    """Warm-up as a share of the decay's length."""
    lr_warmup_init: float = 0.0
    """Learning rate at the start of the warm-up."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of the last phase of WSD."""
    lr_wsd_decay_iters: int | None = None
    """Iterations of the last phase of WSD."""
    lr_wsd_decay_samples: int | None = None
    """The same in samples, for runs with train-samples."""
    lr_scaling_rule: Literal["linear", "sqrt"] | None = None
    """Multiply learning rates by global-batch-size / lr-scaling-base-batch-size, or by its square root."""
    lr_scaling_base_batch_size: int | None = None
    """Global batch size for which the learning rates were chosen."""
    weight_decay: float = 0.01
    """Weight decay of matrices (biases and norms have none)."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """Course of weight decay over the run; constant: it is weight-decay."""
    start_weight_decay: float | None = None
    """Weight decay at the start of the run, where it rises."""
    end_weight_decay: float | None = None
    """Weight decay at its end."""
    clip_grad: float = 1.0
    """Largest global norm of the gradient; 0: no clipping."""
    adam_beta1: float = 0.9
    """Adam's decay of the first moment."""
    adam_beta2: float = 0.999
    """Adam's decay of the second moment."""
    adam_eps: float = 1e-8
    """Added to the root of Adam's second moment."""
    sgd_momentum: float = 0.9
    """Momentum of sgd."""
    muon_momentum: float = 0.9
    """Muon's decay of the momentum."""
    muon_nesterov: bool = False
    """Let the gradient count once more beside the momentum."""
    muon_num_ns_steps: int = 5
    """Newton-Schulz steps by which Muon makes an update orthogonal."""
    muon_coefficient_type: Literal["simple", "quintic", "polar_express"] = "quintic"
    """Coefficients of the steps: one set, five in turn, or eight of which the last repeats."""
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = "spectral"
    """Multiply updates [rows, columns] by the root of max(rows, columns), rows / columns, or max(1, rows / columns)."""
    muon_extra_scale_factor: float = 1.0
    """Multiply Muon's updates by this, too; 0.2 with spectral gives them the size of adam's."""
    muon_fp32_matmul_prec: Literal["medium", "high"] = "medium"
    """Newton-Schulz steps in bf16 (medium) or in fp32 (high)."""
    use_precision_aware_optimizer: bool = False
    """With bf16 or fp16: let the optimizer keep what it keeps in the four dtypes that follow."""
    main_grads_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of the buffers in which gradients are added up and reduced."""
    main_params_dtype: Literal["fp32", "fp16"] = "fp32"
    """Dtype of the master weights."""
    store_param_remainders: bool = False
    """With bf16: keep of each fp32 master what its parameter lacks of it, 16 bits instead of 32; no bit changes."""
    exp_avg_dtype: Literal["fp32", "bf16", "fp16", "int8", "fp8"] = "fp32"
    """Dtype of Adam's average of gradients, or of sgd's and muon's momentum. int8 and fp8: in blocks of one scale."""
    exp_avg_sq_dtype: Literal["fp32", "bf16", "int8", "fp8"] = "fp32"
    """Dtype of Adam's average of their squares. int8 and fp8: its root, in blocks with a scale each."""

    @property
    def narrow(self) -> dict[str, str]:
        """The fields of the precision-aware optimizer that ask for less than fp32."""
        names = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
        return {name: value for name in names if (value := getattr(self, name)) != "fp32"}

    def learning_rate_multiplier(self, global_batch_size: int) -> float:
        """Return the factor of every learning rate by lr-scaling-rule, except lr-warmup-init."""
        if self.lr_scaling_rule is None or self.lr_scaling_base_batch_size is None:
            return 1.0
        ratio = global_batch_size / self.lr_scaling_base_batch_size
        return ratio if self.lr_scaling_rule == "linear" else math.sqrt(ratio)


def noam_maximum(factor: float, hidden_size: int, warmup_steps: float) -> float:
    """The learning rate at the end of noam's warm-up (Vaswani et al. 2017, equation 3, at step = warmup_steps)."""
    return factor / math.sqrt(hidden_size * warmup_steps)
