"""Changes of a stage after which its backward pass gives only the terms that one rank has in sums over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megalite.extras.verify.points import global_name
from megalite.model.gpt import GPT
from megalite.model.moe import Experts
from megalite.model.router import Router
from megalite.parallel.linear import RowParallelLinear
from megalite.parallel.parameter import Parameter
from megalite.parallel.stage import TermSums
from megalite_kernels.permutation import occurrences
from megalite_kernels.routing import choose_experts

Mask = Callable[[Tensor], Tensor]
"""Function from a gradient to the part of it that is a rank's own."""


def kept_features(numbers: Tensor) -> Mask:
    """Return a mask that keeps some features, the last dimension."""

    def keep(gradient: Tensor) -> Tensor:
        mask = torch.zeros(gradient.shape[-1], dtype=gradient.dtype)
        mask[numbers] = 1.0
        return gradient * mask

    return keep


def kept_tokens(places: Tensor) -> Mask:
    """Return a mask that keeps some tokens, the first dimension."""

    def keep(gradient: Tensor) -> Tensor:
        mask = torch.zeros_like(gradient)
        mask[places] = 1.0
        return gradient * mask

    return keep


def mask_inputs_of_rows(network: GPT, mask_of: Callable[[str], Mask | None]) -> None:
    """Mask the gradients of the inputs of row-parallel layers, which tensor-parallel ranks have parts of.

    `mask_of`: from the name of a layer to its mask; None to leave it.
    """

    def look(mask: Mask) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def before(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            if arguments[0].requires_grad:
                arguments[0].register_hook(mask)

        return before

    for name, module in _rows(network):
        if (mask := mask_of(name)) is not None:
            module.register_forward_pre_hook(look(mask))


def _rows(network: GPT) -> Iterator[tuple[str, RowParallelLinear]]:
    for path, module in network.named_modules():
        if isinstance(module, RowParallelLinear):
            yield global_name(path, network.stage_layers.first_layer), module


def keep_inner_features_of_experts(network: GPT, index: int, count: int) -> None:
    """Have backward pass through a block of experts' inner features alone, which a tensor-parallel rank has."""
    for module in network.modules():
        if isinstance(module, Experts):
            width = module.down.shape[-1]
            block = torch.zeros(width, dtype=module.down.dtype)
            block[torch.arange(width).chunk(count)[index]] = 1.0
            module.down_product = _through_block(module.down_product, block)


def _through_block(product: Callable[..., Tensor], block: Tensor) -> Callable[..., Tensor]:
    """Return a product of the same values, whose gradients are those of a block of the inner features."""

    def through(inner: Tensor, weights: Tensor, activation: Any, down: Parameter, groups: Any) -> Tensor:
        masked = down.frozen_alias()
        masked.data = down.detach() * block
        own = product(inner, weights, activation, masked, groups)
        with torch.no_grad():
            rest = product(inner, weights, activation, down, groups) - own
        return own + rest

    return through


def change_output_gradient(module: nn.Module, change: Mask) -> None:
    """Change the gradient of a module's output, of which its weights get theirs; of a router, that of its logits."""
    if isinstance(module, Router):
        right = module._logits

        def logits(hidden: Tensor) -> Tensor:
            found = right(hidden)
            if found.requires_grad:
                found.register_hook(change)
            return found

        module._logits = logits  # type: ignore[method-assign]
        return

    def look(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if first.requires_grad:
            first.register_hook(change)

    module.register_forward_hook(look)


def balance_parts(network: GPT, parts: Sequence[Tensor]) -> None:
    """Have each part of the tokens, by their places, balance its experts' loads by itself; the mean over the parts."""
    for module in network.modules():
        if isinstance(module, Router):
            module._terms = _of_parts(module, parts)  # type: ignore[method-assign,assignment]


def _of_parts(router: Router, parts: Sequence[Tensor]) -> Callable[[Tensor, Tensor | None, Tensor | None], TermSums]:
    """Return a router's sums of loss terms, as means over parts of the tokens that each have counts of their own."""
    right = router._terms

    def terms(logits: Tensor, of_sequences: Tensor | None, padding: Tensor | None) -> TermSums:
        if of_sequences is None:
            return right(logits, of_sequences, padding)
        found = []
        for places in parts:
            own, own_padding = logits[places], None if padding is None else padding[places]
            chosen = choose_experts(own.detach().flatten(0, 1), None, router.rule.unrestricted).view(*own.shape[:2], -1)
            if own_padding is not None:
                chosen = chosen.masked_fill(own_padding[:, :, None], -1)
            counts = occurrences(chosen.transpose(0, 1).flatten(1), router.num_experts)
            found.append(right(own, counts, own_padding))
        return {name: torch.stack([each[name] for each in found]).sum(0) / len(parts) for name in found[0]}

    return terms
