"""Initial weights of a network with depths of multi-token prediction, by the rule of `initial_weights.py`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tests.initial_weights import Network


@dataclass(frozen=True)
class NetworkWithDepths(Network):
    """Network with depths that have weights of their own."""

    depths: int = 0
    letters: str | None = None  # of each depth, as in a pattern; None: one layer with both halves

    def drawn(self) -> dict[str, tuple[tuple[int, ...], float]]:
        projections = {f"mtp.{depth}.projection": ((self.hidden, 2, self.hidden), self.std) for depth in self.numbers}
        return super().drawn() | self._of_depths("drawn") | projections

    def uniform(self) -> dict[str, tuple[tuple[int, ...], str, float, float]]:
        return super().uniform() | self._of_depths("uniform")

    def constant(self) -> dict[str, tuple[tuple[int, ...], float]]:
        found = super().constant()
        for place in (f"mtp.{depth}.{each}_norm" for depth in self.numbers for each in ("embedding", "hidden")):
            found[place + ".weight"] = found["final_norm.weight"]
            if self.centered:
                found[place + ".bias"] = found["final_norm.bias"]
        return found | self._of_depths("constant")

    @property
    def numbers(self) -> range:
        return range(self.depths)

    def _of_depths(self, kind: str) -> dict[str, Any]:
        """Return what a network of a depth's layers alone has, under the names of each depth."""
        if not self.depths:
            return {}
        options = {name: value for name, value in vars(self).items() if name not in ("depths", "letters")}
        last = self.layers - 1 in self.expert_layers
        having = (0,) if last else ()
        if self.letters is not None:
            feeds = [letter for letter in self.letters if letter in "-E"]
            having = tuple(number for number, letter in enumerate(feeds) if letter == "E")
        alone = _Alone(**options, residual_std=self.small)
        behind = self.behind[-1:] if self.letters is None else ()
        alone = replace(
            alone, layers=1, pattern=self.letters, behind=behind, expert_layers=having, positions=0, tied=True
        )
        alone = replace(alone, indexed=tuple(range(alone.latent_layers)))
        inner = getattr(alone, kind)()
        return {f"mtp.{n}.{name}": each for n in self.numbers for name, each in inner.items() if name != _TABLE}


_TABLE = "embedding.word"


@dataclass(frozen=True)
class _Alone(Network):
    """Network of layers whose output layers are as small as in a deeper one."""

    residual_std: float = 0.0

    @property
    def small(self) -> float:
        return self.residual_std
