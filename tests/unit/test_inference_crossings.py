"""Pairs of a network's features and those of generation, on one rank: text, scores and ends as by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from megalite.inference import generation
from megalite.inference.generation import generate
from megalite.inference.sampling import Sampling
from megalite.parallel.mesh import ParallelMesh
from tests.distributed.inference_run import initialized_network, whole_weights
from tests.distributed.layout_cell import VOCABULARIES, Cell, oracle
from tests.distributed.layout_expected import one_thread
from tests.harness.covering_array import Factors, Row, covering_array, every_value_once
from tests.harness.wide import wide_except

PROMPTS = [[3, 1, 4, 1, 5, 9], [8, 9], [3, 2, 3, 8], [6]]
LEARNED = 13
"""Positions of the families that learn them."""
FACTORS: Factors = {
    "family": ("gpt2", "llama", "neox", "gemma", "gemma3", "deepseek"),
    "key_values": ("mha", "gqa", "mqa", "uneven6"),
    "vocabulary": tuple(VOCABULARIES),
    "tied": (True, False),
    "qk_layernorm": (False, True),
    "batch_size": (None, 1, 3),
    "chunk": (512, 2),
    "below": (None, 11),
    "ends": ((), (7, 2), tuple(range(10))),
    "sampling": ((0.0, 0, 1.0), (1.0, 0, 1.0), (2.0, 5, 1.0), (0.7, 0, 0.8), (1.5, 6, 0.6)),
    "most": (0, 3, 9),
    "stops": (False, True),
}
"""`chunk`: tokens of a prompt that are read at once. `below`: only tokens below are chosen. `sampling`: temperature,
top_k and top_p. `stops`: the second text is stopped after two new tokens."""


def possible(row: Row) -> bool:
    """Tell whether a row differs from plainer ones."""
    return row["most"] > 0 or not (row["stops"] or row["ends"])


ROWS = covering_array(FACTORS, possible, candidates=4)


def shown(row: Row) -> str:
    return "-".join(f"{name}{value}" if not isinstance(value, str) else value for name, value in row.items() if value)


def log_chances(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Return the logarithms of the chances of all tokens: of the likeliest ones, in the order of their logits."""
    order = logits.sort(descending=True, stable=True).indices.tolist()
    kept = order[: top_k or len(order)]
    whole = (logits[kept] / temperature).softmax(0).tolist()
    before, count = 0.0, 0
    for chance in whole:
        if before >= top_p and count:
            break
        before, count = before + chance, count + 1
    found = torch.full_like(logits, -math.inf)
    found[kept[:count]] = (logits[kept[:count]] / temperature).log_softmax(0)
    return found


@pytest.mark.parametrize("row", wide_except(ROWS, every_value_once(ROWS)), ids=shown)
def test_text_scores_and_ends_are_those_by_hand(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell(**{name: row[name] for name in ("family", "key_values", "vocabulary", "tied", "qk_layernorm")})
    monkeypatch.setattr(generation, "_CHUNK", row["chunk"])
    temperature, top_k, top_p = row["sampling"]
    scores: dict[int, list[tuple[float, float]]] = {number: [] for number in range(len(PROMPTS))}
    texts: dict[int, list[int | str]] = {number: [] for number in range(len(PROMPTS))}

    def stop(index: int, tokens: Sequence[int]) -> bool:
        return row["stops"] and index == 1 and len(tokens) == len(PROMPTS[1]) + 2

    with one_thread():
        for index, event in generate(
            initialized_network(ParallelMesh(), cell),
            PROMPTS,
            max_new_tokens=row["most"],
            ends=row["ends"],
            sampling=Sampling(temperature, top_k, top_p, 5),
            batch_size=row["batch_size"],
            stop=stop,
            vocab_size=row["below"],
            scored=lambda index, own, chosen: scores[index].append((own, chosen)),
        ):
            texts[index].append(event)
        for index, prompt in enumerate(PROMPTS):
            *new, end = texts[index]
            tokens = [*prompt, *map(int, new)]
            assert end in ("stop", "length")
            assert not set(new) & set(row["ends"])
            longest = row["most"] if cell.family != "gpt2" else min(row["most"], LEARNED + 1 - len(prompt))
            stopped = row["stops"] and index == 1 and len(new) == 2
            assert len(new) == longest or end == "stop"
            if end == "stop" and not stopped:
                assert row["ends"]
            whole = torch.tensor([tokens])
            logits = oracle(cell).logits(whole_weights(cell), whole, torch.arange(len(tokens))[None])[0]
            logits = logits[len(prompt) - 1 :, : VOCABULARIES[cell.vocabulary][0]]
            for place, (token, (own, chosen)) in enumerate(zip(tokens[len(prompt) :], scores[index], strict=True)):
                assert own == pytest.approx(logits[place].log_softmax(0)[token].item(), rel=1e-9, abs=1e-9)
                allowed = logits[place, : row["below"]]
                if temperature == 0.0:
                    assert token == int(allowed.argmax())
                    assert chosen == 0.0
                else:
                    chances = log_chances(allowed, temperature, top_k, top_p)
                    assert chosen == pytest.approx(chances[token].item(), rel=1e-8, abs=1e-8)
            if temperature == 0.0 and end == "stop" and not stopped:  # by a token that is not shown
                assert int(logits[-1, : row["below"]].argmax()) in row["ends"]
