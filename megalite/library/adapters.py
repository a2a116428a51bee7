"""Adapters for models of one's own (docs/adapters.md)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config.adapters import AdaptersConfig
from megalite.errors import MegaliteError
from megalite.modules.records import SEQUENCE_PARALLEL
from megalite.parallel.adapter import adaptable_matrices, add_adapters, is_target


class AdaptedLinear(nn.Linear):
    """A plain `nn.Linear` with an adapter. Its weight and bias keep their names."""

    def __init__(self, linear: nn.Linear, config: AdaptersConfig) -> None:
        """Take the parameters of a layer over."""
        assert config.lora_rank is not None
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias, self.scale = linear.weight, linear.bias, config.lora_scale
        self.lora_a = nn.Parameter(linear.weight.new_empty(config.lora_rank, self.in_features))
        self.lora_b = nn.Parameter(linear.weight.new_zeros(self.out_features, config.lora_rank))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))
        if hasattr(linear.weight, SEQUENCE_PARALLEL):
            for factor in (self.lora_a, self.lora_b):
                setattr(factor, SEQUENCE_PARALLEL, getattr(linear.weight, SEQUENCE_PARALLEL))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self.scale * F.linear(F.linear(input, self.lora_a), self.lora_b)


def add_lora(
    module: nn.Module,
    rank: int,
    *,
    alpha: float | None = None,
    target_modules: Sequence[str] = ("all-linear",),
    use_rslora: bool = False,
    use_dora: bool = False,
) -> nn.Module:
    """Freeze a module, and give its linear layers adapters, which alone are trained. Returns the module.

    These are the matrices of parallel layers, by their names in checkpoints, and plain `nn.Linear`s, by their names in
    the module. Parameters that are to be trained, too, get `requires_grad = True` afterwards.

    >>> module = add_lora(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), rank=2, target_modules=["0"])
    >>> [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    ['0.lora_a', '0.lora_b']

    Args:
        alpha: adapters' outputs are multiplied with this / rank; None for rank.
        target_modules: ends of names, or patterns of them.
        use_rslora: divide by the root of the rank instead.
        use_dora: train the lengths of rows apart, in parallel layers.

    Raises:
        MegaliteError: a name is that of no layer, or the rank is more than a matrix can have.
    """
    config = AdaptersConfig(
        lora_rank=rank,
        lora_alpha=alpha,
        lora_target_modules=tuple(target_modules),
        use_rslora=use_rslora,
        use_dora=use_dora,
    )
    plain = {name: each for name, each in module.named_modules() if type(each) is nn.Linear}
    names = [*(matrix.name for matrix in adaptable_matrices(module)), *plain]
    for target in target_modules:
        if not any(is_target(name, [target]) for name in names):
            shown = ", ".join(names[:8]) or "none"
            raise MegaliteError(f"add_lora: no linear layer of this module is {target}; it has {shown}")
    add_adapters(module, config)
    for name, linear in plain.items():
        if is_target(name, config.lora_target_modules):
            if use_dora:
                raise MegaliteError(f"add_lora: {name} is a plain nn.Linear, and use_dora is for parallel layers")
            if rank > min(linear.in_features, linear.out_features):
                raise MegaliteError(f"add_lora: rank={rank} is more than {name} can have: it is {linear}")
            parent, _, own = name.rpartition(".")
            setattr(module.get_submodule(parent), own, AdaptedLinear(linear, config))
    return module
