"""Keys and values of latent attention, made of latents that travel between context-parallel ranks in their place."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.parallel.parameter import DenseGradient, Parameter, ProductGradient, accumulate_grad
from megalite_kernels.attention import same_width


def keys_and_values(of_heads: Tensor, rotated_key: Tensor, key_width: int) -> tuple[Tensor, Tensor]:
    """Return keys [..., heads, key + rotated width] and values [..., heads, value width].

    Args:
        of_heads: what is made of latents, [..., heads, key + value width], keys first.
        rotated_key: the part of the keys that all heads share, [..., rotated width].
        key_width: width of the part of its own.
    """
    key, value = of_heads.tensor_split([key_width], dim=-1)
    shared = rotated_key.unsqueeze(-2).expand(*key.shape[:-1], -1)
    return torch.cat([key, shared], dim=-1), value


class LatentExpansion:
    """`Expansion` of a layer of latent attention, for one forward. Latents stand before rotated keys.

    The gradient of the weight is summed over blocks in fp32 or wider, and handed over once, in the action that computes
    it: schedules that defer weight gradients find it done.
    """

    def __init__(self, weight: Tensor, heads: int, rank: int, key_width: int) -> None:
        """Take the weight [heads * (key + value width), rank] of this rank's heads, a parameter or made of some."""
        self.weight, self._heads, self._rank, self._key_width = weight, heads, rank, key_width
        self._sum: Tensor | None = None

    def keys_and_values(self, block: Tensor) -> Tensor:
        """See `Expansion`. Both are as wide as the wider one."""
        latent, rotated_key = block[0, :, 0].tensor_split([self._rank], dim=-1)
        of_heads = F.linear(latent, self.weight).unflatten(-1, (self._heads, -1))
        key, value = keys_and_values(of_heads, rotated_key, self._key_width)
        return torch.stack(same_width(key, key, value)[1:]).transpose(2, 3)

    def gradient(self, block: Tensor, of_keys_and_values: Tensor) -> Tensor:
        """See `Expansion`."""
        latent, rotated_key = block[0, :, 0].tensor_split([self._rank], dim=-1)
        of_key, of_value = of_keys_and_values.transpose(2, 3).unbind(0)
        value_width = len(self.weight) // self._heads - self._key_width
        of_shared = of_key[..., self._key_width : self._key_width + rotated_key.shape[-1]].sum(dim=-2)
        of_heads = torch.cat([of_key[..., : self._key_width], of_value[..., :value_width]], dim=-1)
        of_heads = of_heads.flatten(-2).to(self.weight.dtype)
        if self.weight.requires_grad:
            product = ProductGradient(of_heads.flatten(0, 1), latent.flatten(0, 1))
            if self._sum is None:
                self._sum = torch.empty_like(self.weight, dtype=of_key.dtype, requires_grad=False)
                product.add_to(self._sum, overwrite=True)
            else:
                product.add_to(self._sum, overwrite=False)
        of_latent = (of_heads @ self.weight.detach()).to(of_shared.dtype)
        return torch.cat([of_latent, of_shared], dim=-1)[None, :, None]

    def of_weight(self) -> Tensor | None:
        """See `Expansion`."""
        found, self._sum = self._sum, None
        if found is None or not isinstance(self.weight, Parameter):
            return None if found is None else found.to(self.weight.dtype)
        return accumulate_grad(self.weight, DenseGradient(found))
