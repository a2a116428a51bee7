"""Flags of the command to turn off next, so that the next trace narrows the cause of a difference (`--bisect`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from megalite.extras.verify.command import Command
from megalite.extras.verify.judgement import Judgement


@dataclass(frozen=True)
class _Suspect:
    """Feature that can be turned off.

    Attributes:
        points: pattern of the points that it computes or passes on; of weights, of their logical names.
        phases: forward, backward, weights: where it acts.
        axis: the axis of ranks whose size makes it act; empty for none.
        text: what to do.
    """

    points: str
    phases: tuple[str, ...]
    axis: str
    text: str


_ALL = ("forward", "backward", "weights")
_ANY = r".*"
_SUSPECTS = (
    _Suspect(r"norm|router|embedding", ("backward", "weights"), "tp", "leave out --sequence-parallel"),
    _Suspect(r"attention|mlp|embedding|head", _ALL, "tp", "--tensor-model-parallel-size 1"),
    _Suspect(r"attention|norm", _ALL, "cp", "--context-parallel-size 1"),
    _Suspect(r"mlp|router|experts", _ALL, "ep", "--expert-model-parallel-size 1"),
    _Suspect(_ANY, ("weights",), "dp", "leave out --overlap-grad-reduce and --overlap-param-gather"),
    _Suspect(_ANY, ("weights",), "dp", "leave out --use-distributed-optimizer"),
    _Suspect(_ANY, _ALL, "pp", "--pipeline-model-parallel-size 1"),
)
_ALWAYS = (
    _Suspect(r"attention\.output|attention$", ("forward", "backward"), "", "--attention-backend unfused"),
    _Suspect(r"attention", ("forward", "backward"), "", "--no-rope-fusion, --no-masked-softmax-fusion"),
    _Suspect(r"mlp", ("forward", "backward"), "", "--no-bias-swiglu-fusion, --no-bias-gelu-fusion"),
    _Suspect(r"norm", ("forward", "backward"), "", "--no-persist-layer-norm; --transformer-impl local"),
    _Suspect(_ANY, ("backward", "weights"), "", "leave out --recompute-granularity"),
    _Suspect(_ANY, ("weights",), "", "--no-gradient-accumulation-fusion; a --global-batch-size of one micro-batch"),
    _Suspect(r"head", _ALL, "", "leave out --cross-entropy-loss-fusion"),
)


def next_flags(command: Command, first: Judgement) -> list[str]:
    """Return what to turn off next, the likeliest first: what acts where the first difference is, and in its phase."""
    name = first.entry.name if first.point is None else first.point.module
    phase = "weights" if first.point is None else "backward" if first.entry.role.endswith("gradient") else "forward"
    return list(dict.fromkeys(_suspected(command, name, phase)))


def _suspected(command: Command, name: str, phase: str) -> Iterator[str]:
    for suspect in _SUSPECTS:
        acts = command.sizes.get(suspect.axis, 1) > 1
        if "--sequence-parallel" in suspect.text:
            acts = acts and command.config.parallel.sequence_parallel
        if acts and phase in suspect.phases and re.search(suspect.points, name):
            yield suspect.text
    for suspect in _ALWAYS:
        if phase in suspect.phases and re.search(suspect.points, name):
            yield suspect.text
