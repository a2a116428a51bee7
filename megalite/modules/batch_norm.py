"""Batch normalization over the batch of several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megalite.parallel import collectives
from megalite.parallel.mesh import Group, ParallelMesh
from megalite.parallel.stage_module import Inside
from megalite_kernels.products import rounded


class SyncBatchNorm(nn.Module):
    """Batch normalization of [batch, features, ...] over the micro-batches of all ranks along `axes`.

    Arguments, parameters and buffers are those of `nn.BatchNorm2d`. Until `bind`, a rank is alone.
    """

    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(
        self,
        num_features: int,
        axes: Sequence[str] = ("dp", "cp"),
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__()
        self.axes, self.eps, self.momentum = tuple(axes), eps, momentum
        self.weight = nn.Parameter(torch.ones(num_features)) if affine else None
        self.bias = nn.Parameter(torch.zeros(num_features)) if affine else None
        tracked = track_running_stats
        self.register_buffer("running_mean", torch.zeros(num_features) if tracked else None)
        self.register_buffer("running_var", torch.ones(num_features) if tracked else None)
        self.register_buffer("num_batches_tracked", torch.tensor(0) if tracked else None)
        self.group = Group((0,), 0)

    def bind(self, mesh: ParallelMesh) -> None:
        """Choose the ranks. All of them call it together."""
        self.group = mesh.group(*self.axes)

    @property
    def inside(self) -> list[Inside]:
        return [Inside("batch statistics", " x ".join(self.axes))] if self.group.size > 1 else []

    def forward(self, input: Tensor) -> Tensor:
        """Normalize each feature of [batch, features, ...]."""
        shape = (1, -1) + (1,) * (input.dim() - 2)
        if self.training or self.running_mean is None or self.running_var is None:
            normal, mean, variance, count = _Normalize.apply(input, self.eps, self.group)
            if self.training:
                self._track(mean, variance, count)
        else:
            wide = torch.promote_types(input.dtype, torch.float32)
            scale = (self.running_var.to(wide) + self.eps).rsqrt()
            normal = ((input.to(wide) - self.running_mean.to(wide).view(shape)) * scale.view(shape)).to(input.dtype)
        if self.weight is None or self.bias is None:
            return normal
        return torch.addcmul(self.bias.view(shape), self.weight.view(shape), normal)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked += 1
        rate = 1.0 / self.num_batches_tracked.to(mean.dtype) if self.momentum is None else self.momentum
        unbiased = variance * (count / (count - 1).clamp(min=1))
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            running += (rate * (new - running)).to(running.dtype)


class _Normalize(torch.autograd.Function):
    """Normalized values, with the mean, the variance and the number of elements of each feature over the ranks."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, eps: float, group: Group) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Normalize features by the mean and variance over all ranks, and return these with the number of values."""
        values = _by_feature(input)
        own = values.mean(1)
        squares = (values - own[:, None]).square().sum(1)  # around the rank's own mean: nothing cancels
        statistics = torch.stack((own, squares, torch.full_like(own, values.shape[1])))
        means, squares, counts = collectives.all_gather(statistics[None], group).unbind(1)
        count = counts.sum(0)
        mean = (means * counts).sum(0) / count
        variance = (squares + counts * (means - mean).square()).sum(0) / count
        scale = (variance + eps).rsqrt()
        ctx.save_for_backward(input, mean, scale, count)
        ctx.group = group
        ctx.mark_non_differentiable(mean, variance, count)
        return _as((values - mean[:, None]) * scale[:, None], input), mean, variance, count

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        input, mean, scale, count = ctx.saved_tensors
        normal = (_by_feature(input) - mean[:, None]) * scale[:, None]
        gradient = _by_feature(gradients[0])
        sums = torch.stack((gradient.sum(1), (gradient * normal).sum(1)))
        sums = collectives.all_reduce_in_rank_order_(sums, ctx.group) / count
        inner = gradient - sums[0][:, None] - normal * sums[1][:, None]
        return _as(inner * scale[:, None], gradients[0]), None, None


def _by_feature(values: Tensor) -> Tensor:
    """Return [batch, features, ...] as [features, elements], in fp32 or wider."""
    return values.to(torch.promote_types(values.dtype, torch.float32)).transpose(0, 1).flatten(1)


def _as(values: Tensor, like: Tensor) -> Tensor:
    """Return [features, elements] in the shape and dtype of [batch, features, ...]."""
    moved = like.transpose(0, 1)
    return rounded(values.view(moved.shape).transpose(0, 1), like.dtype)
