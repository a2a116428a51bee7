"""Local updates: replicas change their own weights, and exchange what has changed once in a while.

- local SGD (arXiv:1805.09767) averages the replicas' weights. post-local SGD (arXiv:1808.07217) begins with plain data
  parallelism.
- FedAvg (arXiv:1602.05629) weighs the replicas by the tokens that they have learned from.
- EASGD (arXiv:1412.6651) pulls each replica towards a center, and the center towards all replicas.
- DiLoCo (arXiv:2311.08105) takes the mean change as the gradient of an outer Nesterov momentum. Streaming DiLoCo
  (arXiv:2501.18512) exchanges fragments of the network at different steps, while the replicas compute.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megalite.config.synchronization import SynchronizationConfig
from megalite.extras.synchronization.warmup import WarmupReduction
from megalite.optim.replica import ANCHOR
from megalite.optim.shard import Shard
from megalite.parallel import collectives
from megalite.parallel.collectives import Pending
from megalite.parallel.mesh import Group

MOMENTUM, EXCHANGED = "outer_momentum", "exchanged"
"""State of a slice that is the same on all replicas: the momentum of the outer optimizer, and the sum of the changes in
an exchange that is under way."""
Sum = Callable[[Tensor, int], Pending]
"""Function that starts to sum a tensor in place over the replicas. It is given the number of steps, too."""


def kept_names(config: SynchronizationConfig) -> tuple[str, ...]:
    """Return the names of the state of an exchange."""
    return (
        ANCHOR,
        *((MOMENTUM,) if config.outer_is_nesterov else ()),
        *((EXCHANGED,) if config.local_update_delay else ()),
    )


class LocalUpdate:
    """Exchange between the replicas of the slices that this rank owns, after a step's update.

    Buckets are dealt to fragments in turn, those of each kind apart, so that the copies of a tied weight are in the
    same one. When an exchange begins is a pure function of the number of local steps.
    """

    def __init__(
        self,
        config: SynchronizationConfig,
        shards: Sequence[Shard],
        replicas: Group,
        device: torch.device,
        sums: Sequence[Sum],
    ) -> None:
        """Allocate the state.

        Args:
            config: the method, its period and the outer optimizer.
            shards: the shards of this rank, whose owned slices are exchanged.
            replicas: the ranks that own the same slices, one per replica.
            device: the device of this rank.
            sums: sums the changes of each shard over the replicas.
        """
        self.config, self.shards, self.replicas, self._device = config, shards, replicas, device
        self.sums = sums
        self.nesterov = config.outer_is_nesterov
        self.state: Mapping[str, list[Tensor]] = {
            name: [_zeros_like(_owned(shard)) for shard in shards] for name in kept_names(config)
        }
        """Flat state by name, one tensor per shard, in fp32 or the wider dtype of the parameters."""
        self.outer_lr = config.outer_lr or (0.7 if config.local_update == "diloco" else 1.0)
        self._elastic_rate = config.elastic_rate or 0.9 / replicas.size
        self._fragments = _fragments(shards, config.local_update_fragments)
        self._begun = set[int]()
        self._pending: dict[int, Pending] = {}  # by the number of the shard
        of_shards = [each.reduction for shard in shards for each in shard.bucket.accumulators]
        self._reductions = [each for each in of_shards if isinstance(each, WarmupReduction)]
        self._changes: dict[int, Tensor] = {}
        self._iteration, self._tokens_of_step, self._share = 0, 0.0, 1.0
        self.tokens = torch.zeros(1, dtype=torch.float64, device=device)
        """Number of this replica's tokens since the last exchange."""
        self.begin()

    def begin(self) -> None:
        """Take the present weights as those after the last exchange: at the start, or after a load of weights alone."""
        for anchor, shard in zip(self.state[ANCHOR], self.shards, strict=True):
            anchor.copy_(_owned(shard))

    @property
    def is_local(self) -> bool:
        """False in the first steps, of plain data parallelism: gradients are summed over the replicas then."""
        return self._iteration >= self.config.local_update_warmup_iters

    def begin_step(self, iteration: int, tokens: float) -> None:
        """Tell the number of steps before this one, and the count of this replica's tokens in it."""
        self._iteration = iteration  # which decides whether this step is local
        self._tokens_of_step = tokens if self.is_local else 0.0
        for reduction in self._reductions:
            reduction.is_local = self.is_local

    def advance(self) -> bool:
        """Exchange what is due after this step. Returns True if weights have changed."""
        step = self._iteration + 1 - self.config.local_update_warmup_iters
        if step <= 0:
            if step == 0:
                self.begin()
            return False
        delay = self.config.local_update_delay
        changed = False
        begin = [*self._due(step)]
        if begin and self.config.local_update == "fedavg":
            self._share = self._share_of_tokens()
        for number in begin:
            self._begin_exchange(number)
        for number in self._due(step - delay):
            if number in self._begun:
                self._finish_exchange(number)
                changed = True
        if changed:
            self.tokens.zero_()
        return changed

    @contextmanager
    @torch.no_grad()
    def with_anchor(self) -> Iterator[None]:
        """Compute with the weights after the last exchange within the block, which are the same on all replicas."""
        kept = [shard.bucket.parameter_shard.clone() for shard in self.shards]
        self._set_parameters(self.state[ANCHOR] if self.is_local else kept)
        try:
            yield
        finally:
            self._set_parameters(kept)

    def _set_parameters(self, values: Sequence[Tensor]) -> None:
        """Set the owned slices of the parameters, and gather those of the other ranks of the replica."""
        for shard, own in zip(self.shards, values, strict=True):
            bucket = shard.bucket
            bucket.finish_parameter_gather()
            bucket.parameter_shard.copy_(own)
            if bucket.zero_stage < 3:
                bucket.begin_parameter_gather()
                bucket.finish_parameter_gather()

    def _due(self, step: int) -> Iterator[int]:
        """Yield the numbers of the shards whose exchange begins after this local step."""
        period, fragments = self.config.local_update_period, self.config.local_update_fragments
        for fragment in range(fragments):
            if step > 0 and (step - fragment * period // fragments) % period == 0:
                yield from (number for number, own in enumerate(self._fragments) if own == fragment)

    def before_save(self) -> None:
        """Wait for the messages of the exchanges that are under way, whose sums are state then."""
        for pending in self._pending.values():
            pending.wait()
        self._pending.clear()
        if not self.is_local:
            self.begin()

    def before_load(self) -> None:
        """Mark what a checkpoint may lack."""
        self.tokens.fill_(math.nan)

    def after_load(self, iteration: int, *, has_anchor: bool, has_exchanged: bool) -> None:
        """Begin after this number of steps with what a checkpoint has.

        Tokens are counted anew if a replica has not found its own.
        """
        self._iteration = max(iteration - 1, 0)
        if not has_anchor:
            self.begin()
        self._begun = set(range(len(self.shards)) if has_anchor and has_exchanged else ())
        if not math.isfinite(float(collectives.all_reduce_(self.tokens.clone(), self.replicas))):
            self.tokens.zero_()

    @torch.no_grad()
    def _begin_exchange(self, number: int) -> None:
        """Start to sum over the replicas what has changed in a shard since its last exchange."""
        anchor, masters = self.state[ANCHOR][number], _owned(self.shards[number])
        change = self.state[EXCHANGED][number] if EXCHANGED in self.state else torch.empty_like(anchor)
        torch.sub(anchor, masters, out=change)
        if self.config.local_update == "easgd":
            masters.add_(change, alpha=self._elastic_rate)
        elif self.config.local_update == "fedavg":
            change.mul_(self._share)
        self._changes[number] = change
        self._begun.add(number)
        self._pending[number] = self.sums[number](change, self._iteration)

    def _share_of_tokens(self) -> float:
        """Return this replica's share of the tokens since the last exchange. Replicas without tokens have none of it;
        if all are, they have equal shares."""
        total = float(collectives.all_reduce_(self.tokens.clone(), self.replicas))
        return float(self.tokens) / total if total else 1.0 / self.replicas.size

    @torch.no_grad()
    def _finish_exchange(self, number: int) -> None:
        """Move the anchor by the mean change, and this replica's weights to it."""
        if (pending := self._pending.pop(number, None)) is not None:
            pending.wait()
        self._begun.discard(number)
        shard, anchor, masters = self.shards[number], self.state[ANCHOR][number], _owned(self.shards[number])
        change = self.state[EXCHANGED][number] if EXCHANGED in self.state else self._changes.pop(number)
        if self.config.local_update == "easgd":
            anchor.sub_(change, alpha=self._elastic_rate)
        else:
            if self.config.local_update != "fedavg":
                change.div_(self.replicas.size)
            self._step(number, change)
            masters.copy_(torch.lerp(masters.to(anchor.dtype), anchor, 1.0 - self.config.local_update_mixing))
        if shard.bucket.zero_stage == 0:
            group = shard.bucket.shard_group
            collectives.all_gather_async(masters, group, out=shard.master).wait()
        for segment in shard.segments:
            segment.round_parameters()

    def _step(self, number: int, gradient: Tensor) -> None:
        """Apply the outer optimizer to the anchor."""
        if self.nesterov:
            momentum, decay = self.state[MOMENTUM][number], self.config.outer_momentum
            momentum.mul_(decay).add_(gradient)
            gradient = gradient.add(momentum, alpha=decay)
        self.state[ANCHOR][number].sub_(gradient, alpha=self.outer_lr)

    def agreed(self, is_finite: bool) -> bool:
        """Return whether the gradients of all replicas are finite: otherwise all of them skip the step."""
        infinite = torch.tensor([not is_finite], dtype=torch.float32, device=self._device)
        finite = not float(collectives.all_reduce_(infinite, self.replicas, "max"))
        self.tokens.add_(self._tokens_of_step if finite else 0.0)
        self._tokens_of_step = 0.0
        return finite


def _fragments(shards: Sequence[Shard], count: int) -> list[int]:
    seen, found = Counter[tuple[int, ...]](), []
    for shard in shards:
        copies = shard.bucket.slots[0].parameter.sharding.replica_ranks
        found.append(seen[copies] % count)
        seen[copies] += 1
    return found


def _zeros_like(masters: Tensor) -> Tensor:
    return torch.zeros_like(masters, dtype=torch.promote_types(masters.dtype, torch.float32))


def _owned(shard: Shard) -> Tensor:
    """Return the master weights of the slice that this rank owns. They are a tensor: remainders are refused."""
    masters = shard.owned_masters
    assert isinstance(masters, Tensor)
    return masters
