"""Buffers of plain modules: saved as `State`, and kept the same on the data-parallel ranks."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from megalite.errors import MegaliteError
from megalite.modules.alike import check_same
from megalite.parallel import collectives
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.sharding import AsBuilt, Box, LogicalTensor, Piece, Sharding
from megalite.parallel.state import State

Rule = Literal["keep", "average", "first rank"]
SAVED = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64)
"""Dtypes that a checkpoint can have."""


class KeptBuffers(nn.Module):
    """The persistent buffers of a stage's module. Call `synchronize` after each update, on all ranks together.

    The module sees its buffers as before, and may change them in place or assign others.
    """

    def __init__(self, module: nn.Module, mesh: ParallelMesh, rules: Mapping[str, Rule] | None = None) -> None:
        """Make a `State` of each persistent buffer.

        Args:
            rules: how the buffers whose names match a pattern stay the same on all ranks; the first match counts.
                "keep": they do so by themselves. "average": by their mean over the ranks after each step. "first rank":
                by a copy of the first rank's after each step, as for those that match no pattern.

        Raises:
            MegaliteError: a rule is unknown, fits no buffer or not its dtype, or a checkpoint cannot have the dtype.
        """
        super().__init__()
        self._mesh, self._group = mesh, mesh.group("dp", "cp")
        rules = dict(rules or {})
        if unknown := [rule for rule in rules.values() if rule not in get_args(Rule)]:
            raise MegaliteError(f"{unknown[0]!r} is no rule for buffers: use one of {', '.join(get_args(Rule))}")
        self._buffers_of: list[tuple[nn.Module, str, State, Rule]] = []
        self.states, unused = nn.ModuleList(), set(rules)
        persistent = module.state_dict(keep_vars=True).keys()
        for path, owner in module.named_modules():
            for key, buffer in list(owner.named_buffers(recurse=False)):
                name = f"{path}.{key}" if path else key
                if name not in persistent:
                    continue
                matching = [each for each in rules if fnmatchcase(name, each)]
                unused -= set(matching)
                rule: Rule = rules[matching[0]] if matching else "first rank"
                state = _state(name, buffer, rule, mesh)
                if buffer.dtype in SAVED:
                    setattr(owner, key, state.values)
                self.states.append(state)
                self._buffers_of.append((owner, key, state, rule))
        if unused:
            raise MegaliteError(f"no buffer is called {sorted(unused)[0]}, for which there is a rule")

    def synchronize(self) -> None:
        """Take over buffers that the module has assigned, and apply the rules. Called by all ranks together."""
        self._take_over()
        for rule, values in self._messages():
            flat = torch.cat([each.reshape(-1) for each in values])
            if rule == "average":
                collectives.all_reduce_(flat, self._group).div_(self._group.size)
            else:
                collectives.broadcast_(flat, 0, self._group)
            for each, new in zip(values, flat.split([each.numel() for each in values]), strict=True):
                each.copy_(new.view(each.shape))
        self.restore()

    def collectives(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return the names and ranks of the collectives of `synchronize`, in order."""
        return [(f"buffers by {rule}", self._group.ranks) for rule, _ in self._messages()]

    def check(self) -> None:
        """Check that buffers which the rules do not change are the same on all ranks. Called by all ranks together.

        Raises MegaliteError on all ranks if one is not.
        """
        self._take_over()
        tensors = {state.sharding.name: state.values for _, _, state, rule in self._buffers_of if rule == "keep"}
        check_same(tensors, self._mesh, 'give its buffer the rule "average" or "first rank", or change it alike')

    def _take_over(self) -> None:
        """Take the values of buffers that forward has replaced by other tensors into the state that is saved.

        Raises MegaliteError if a buffer has another shape than before.
        """
        for owner, key, state, _ in self._buffers_of:
            buffer = getattr(owner, key)
            if buffer is not state.values:
                values = _storable(buffer.detach())
                if values.shape != state.values.shape:
                    raise MegaliteError(
                        f"the buffer {state.sharding.name} has become {tuple(values.shape)} from "
                        f"{tuple(state.values.shape)}: it must keep its shape to be saved, or be persistent=False"
                    )
                state.values.copy_(values)
                if buffer.dtype in SAVED:
                    setattr(owner, key, state.values)

    def restore(self) -> None:
        """Set the buffers from their states."""
        for owner, key, state, _ in self._buffers_of:
            buffer = getattr(owner, key)
            if buffer.is_complex():
                buffer.copy_(torch.view_as_complex(state.values))
            elif buffer.dtype not in SAVED:
                buffer.copy_(state.values)
            elif buffer is not state.values:
                setattr(owner, key, state.values)

    def _messages(self) -> list[tuple[Rule, list[Tensor]]]:
        """Return the buffers that travel together: one message per rule and dtype."""
        if self._group.size == 1:
            return []
        messages: dict[tuple[Rule, torch.dtype], list[Tensor]] = {}
        for _, _, state, rule in self._buffers_of:
            if rule != "keep":
                messages.setdefault((rule, state.values.dtype), []).append(state.values)
        return [(rule, values) for (rule, _), values in messages.items()]


def _state(name: str, buffer: Tensor, rule: Rule, mesh: ParallelMesh) -> State:
    """Return the record of a buffer. Raises MegaliteError for a dtype that cannot be saved, or has no average."""
    is_complex = buffer.is_complex()
    if buffer.is_floating_point() and buffer.dtype not in SAVED:
        raise MegaliteError(
            f"the buffer {name} is of {buffer.dtype}, which a checkpoint cannot have: register it with "
            "persistent=False, or in another dtype"
        )
    if rule == "average" and not (buffer.is_floating_point() or is_complex):
        raise MegaliteError(f'the buffer {name} of {buffer.dtype} has no average: use the rule "first rank" or "keep"')
    values = _storable(buffer.detach())
    shape = tuple(values.shape) or (1,)
    piece = Piece(LogicalTensor(name, shape, AsBuilt(), weight_decay=False), Box.whole(shape), 0, shape[0])
    sharding = Sharding(tuple(values.shape), (piece,), mesh.ranks("tp"), grad_is_partial=False)
    return State(sharding, values.dtype, values.device, values)


def _storable(values: Tensor) -> Tensor:
    """Return values in a dtype that a checkpoint can have: complex numbers as pairs, small integers as int64."""
    if values.is_complex():
        return torch.view_as_real(values.resolve_conj()).clone()
    return values.contiguous() if values.is_floating_point() else values.to(torch.int64).contiguous()
