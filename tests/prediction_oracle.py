"""The oracle of multi-token prediction: the tokens of a sample are sliced, depth after depth, and nothing is masked.

It imports nothing of megalite, and takes weights by global logical name:

    mtp.{d}.embedding_norm|hidden_norm|final_norm.weight|bias [hidden]
    mtp.{d}.projection [hidden, 2, hidden]: the embedding's half, then that of the hidden state
    mtp.{d}.layers.{i}...: those of the depth's layers, named as in a network of them alone

d counts from 0, and is always 0 if the depths share one set of weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.dropout_rule import Dropout
from tests.oracle import RECURRENT, Oracle, Routing, Weights, loss_sum_and_count
from tests.qk_clip import Array, note_all

SITES = {"*": (1, 2), "+": (1, 8), "D": (1, 8), "-": (3,), "E": (3,)} | {
    letter: (4 + n,) for n, letter in enumerate(RECURRENT)
}
"""Sites of the dropout of each letter's layers."""


@dataclass(frozen=True)
class DropoutOfDepth(Dropout):
    """Dropout of layers whose numbers begin, at each site, with another one than 0."""

    begins: Mapping[int, int]

    def drop(self, whole: Tensor, probability: float, layer: int, site: int) -> Tensor:
        return super().drop(whole, probability, layer + self.begins[site], site)


@dataclass(frozen=True)
class Depths:
    """Options of the depths that the weights do not determine."""

    count: int
    letters: str | None = None  # of each depth, as in a pattern; None: one layer with both halves
    repeated: bool = False
    detached: bool = False
    factor: float = 0.1

    def losses(
        self,
        oracle: Oracle,
        weights: Weights,
        hidden: Tensor,
        text: Tensor,
        positions: Tensor,
        documents: Tensor | None,
        mask: Tensor,
        dropout: Dropout,
        routing: Routing,
        **options: float,
    ) -> list[Tensor]:
        """Return the mean loss of each depth, weighted.

        Args:
            hidden: that of the network behind its final norm, [batch, sequence, hidden].
            text: [batch, sequence + 1].
            mask: weights of the labels of the network, [batch, sequence].
            options: those of `loss_sum_and_count`.
        """
        batch, length = mask.shape
        main = oracle.letters(weights)
        of_depth = self.letters or main[-2:]
        counts = {letter: of_depth.count(letter) for letter in of_depth}
        if not self.letters or set(of_depth) & set("-E"):
            counts |= dict.fromkeys("-E", of_depth.count("-") + of_depth.count("E"))
        counts |= dict.fromkeys("+D", of_depth.count("+") + of_depth.count("D"))
        of_latents = [letter for letter in of_depth if letter in "+D"]
        sparse = frozenset(number for number, letter in enumerate(of_latents) if letter == "D")
        if self.letters is None and oracle.sparse and len(main) // 2 - 1 in oracle.sparse:
            sparse = frozenset({0})
        found = []
        table = weights["embedding.word"]
        if self.detached:
            table, hidden = table.detach(), hidden.detach()
            weights = weights | {name: weights[name].detach() for name in ("embedding.word", "output") & weights.keys()}
        for depth in range(1, self.count + 1):
            name = f"mtp.{0 if self.repeated else depth - 1}."
            own = {each.removeprefix(name): values for each, values in weights.items() if each.startswith(name)}
            begins = dict[int, int]()
            for letter, sites in SITES.items():
                if (
                    letter in "*+D" and letter not in main + of_depth
                ):  # which share sites: * and + are not in one network
                    continue
                together = {"+": "+D", "D": "+D", "-": "-E", "E": "-E"}.get(letter, letter)
                before = sum(map(main.count, together))
                step = max(counts.values()) if self.repeated else counts.get(letter, 0)
                begins |= dict.fromkeys(sites, before + (depth - 1) * step)
            dropped = DropoutOfDepth(**vars(dropout), begins=begins)
            noted = dict[str, Array]()
            layers = replace(
                oracle,
                largest=noted,
                pattern=self.letters,
                windows=oracle.windows[-1:] if self.letters is None else (),
                sparse=sparse,
                unrotated=(0,) if oracle.windows and len(main) // 2 - 1 in oracle.unrotated else (),
            )
            # Positions without such a token read token 0: nothing that counts sees them.
            read = F.pad(text[:, depth:], (0, length))[:, :length]
            embedded = dropout.drop(table[read] * oracle.embedding_scale, dropout.hidden, depth, 0)
            halves = oracle.norm(own, "embedding_norm", embedded), oracle.norm(own, "hidden_norm", hidden)
            joined = F.linear(torch.cat(halves, dim=-1), own["projection"].flatten(1))
            inner = Routing(
                {each.removeprefix(name): bias for each, bias in routing.biases.items() if each.startswith(name)},
                routing.padding,
                choices=routing.choices,
            )
            hidden = layers.run(own, joined, positions, documents, dropped, inner)
            routing.records.update({name + each: record for each, record in inner.records.items()})
            if oracle.largest is not None:
                note_all(oracle.largest, {name + layer: logits for layer, logits in noted.items()})
            hidden = oracle.norm(own, "final_norm", hidden)
            logits = oracle.logits_of(weights, hidden)[:, : length - depth]
            total, count = logits.new_zeros(()), logits.new_zeros(())
            for place in range(length - depth):
                kept = mask[:, place + depth]
                if documents is not None:
                    label = place + depth + 1
                    same = documents[:, label] == documents[:, place] if label < length else torch.zeros(batch)
                    kept = kept * same
                one = logits[:, place : place + 1], text[:, place + depth + 1, None], kept[:, None]
                of_place, counted = loss_sum_and_count(*one, **options)
                total, count = total + of_place, count + counted
            found.append(self.factor / self.count * total / count.clamp(min=1.0))
        return found
