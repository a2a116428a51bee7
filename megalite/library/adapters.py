"""Adapters for models of one's own (docs/adapters.md)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config.adapters import AdaptersConfig, is_target
from megalite.errors import MegaliteError
from megalite.modules.records import SEQUENCE_PARALLEL
from megalite.parallel.adapter import adaptable_layers, add_adapters, named


class AdaptedLinear(nn.Linear):
    """A plain `nn.Linear` with an adapter. Its weight and bias keep their names."""

    scale: float
    lora_a: nn.Parameter
    lora_b: nn.Parameter

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self.scale * F.linear(F.linear(input, self.lora_a), self.lora_b)


def _adapt(linear: nn.Linear, rank: int, scale: float) -> None:
    """Give a layer an adapter. It stays the same object: all that refer to it have the adapter, and its hooks stay."""
    weight = linear.weight
    linear.__class__ = AdaptedLinear
    assert isinstance(linear, AdaptedLinear)
    linear.scale = scale
    linear.lora_a = nn.Parameter(weight.new_empty(rank, linear.in_features))
    linear.lora_b = nn.Parameter(weight.new_zeros(linear.out_features, rank))
    nn.init.kaiming_uniform_(linear.lora_a, a=math.sqrt(5))
    if hasattr(weight, SEQUENCE_PARALLEL):
        for factor in (linear.lora_a, linear.lora_b):
            setattr(factor, SEQUENCE_PARALLEL, getattr(weight, SEQUENCE_PARALLEL))


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
        MegaliteError: an argument is out of its range, a name is that of no layer, or an adapter is one that a layer
            cannot have. The module is then as it was.
    """
    config = AdaptersConfig(
        lora_rank=rank,
        lora_alpha=alpha,
        lora_target_modules=tuple(target_modules),
        use_rslora=use_rslora,
        use_dora=use_dora,
    )
    layers = adaptable_layers(module)
    plain: dict[str, nn.Linear] = {}
    for name, each in module.named_modules(remove_duplicate=False):
        if type(each) is nn.Linear:
            plain[name] = each
    chosen = {name: linear for name, linear in plain.items() if is_target(name, config.lora_target_modules)}
    for problem in _problems(config, target_modules, chosen):
        raise MegaliteError(f"add_lora: {problem}")
    for target in target_modules:
        matrices = [matrix for layer in layers for matrix in layer.matrices()]
        if not named(matrices, [target]) and not any(is_target(name, [target]) for name in plain):
            shown = ", ".join([*(matrix.name for matrix in matrices), *filter(None, plain)][:8]) or "none"
            raise MegaliteError(f"add_lora: no linear layer of this module is {target}; it has {shown}")
    for layer in layers:
        layer.chosen(config)
    add_adapters(module, config)
    for linear in {id(each): each for each in chosen.values()}.values():
        _adapt(linear, rank, config.lora_scale)
    return module


def _problems(config: AdaptersConfig, targets: Sequence[str], plain: dict[str, nn.Linear]) -> Iterator[str]:
    """Yield what is wrong with the arguments. `plain`: the chosen layers that are no parallel ones, by name."""
    rank, alpha = config.lora_rank, config.lora_alpha
    if type(rank) is not int or rank < 1:
        yield f"rank={rank} must be a whole number above 0"
        return
    if alpha is not None and (type(alpha) not in (int, float) or not 0 < alpha < math.inf):
        yield f"alpha={alpha} must be a number above 0, or None for the rank"
    if isinstance(targets, str):
        yield f"target_modules={targets!r} must be a list of names"
    if not targets:
        yield "target_modules names nothing to adapt: give names, or leave it out for all linear layers"
    for name, linear in plain.items():
        if config.use_dora:
            yield f"{name or 'the module'} is a plain nn.Linear, and use_dora is for parallel layers"
        if rank > min(linear.in_features, linear.out_features):
            yield f"rank={rank} is more than {name or 'the module'} can have: it is {linear}"
