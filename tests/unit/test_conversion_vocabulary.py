"""A Hugging Face model with more tokens: new rows are means, under any cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalite.checkpoint.tensors import Kind
from megalite.config import ModelConfig
from megalite.config.checkpoint import CheckpointConfig, checkpoint_problems
from megalite.conversion.opened import OpenedModel, logical_tensors
from megalite.conversion.vocabulary import with_more_tokens
from megalite.parallel.sharding import Box


class Held:
    """Random tensors by name."""

    def __init__(self, model: ModelConfig) -> None:
        torch.manual_seed(1)
        self.held = {name: torch.randn(shape) for name, shape in logical_tensors(model).items()}
        self.tensors = {name: Kind(tuple(tensor.shape), tensor.dtype) for name, tensor in self.held.items()}

    def fill(self, name: str, box: Box, values: Tensor) -> None:
        values.copy_(self.held[name][box.slices()])


@pytest.mark.parametrize("untied", [True, False])
def test_new_rows_are_the_mean_of_the_saved_ones_under_any_cut(monkeypatch: pytest.MonkeyPatch, untied: bool) -> None:
    monkeypatch.setattr("megalite.conversion.vocabulary._ROWS", 3)
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "max_position_embeddings": 16}
    model = ModelConfig(**sizes, vocab_size=7, untie_embeddings_and_output_weights=untied)  # type: ignore[arg-type]
    source = Held(model)
    opened = with_more_tokens(OpenedModel("a folder", model, source), 10)
    grown = {name for name, kind in opened.source.tensors.items() if kind.shape != source.tensors[name].shape}
    assert opened.config.vocab_size == 10
    assert len(grown) == 1 + untied
    assert "rows 7 to 9 of" in opened.notes[0]
    for name, kind in opened.source.tensors.items():
        expected = source.held[name]
        if name in grown:
            expected = torch.cat([expected, expected.double().mean(0).float().expand(3, -1)])
        whole = torch.full(kind.shape, torch.nan)
        opened.source.fill(name, kind.whole, whole)
        torch.testing.assert_close(whole, expected)
        if len(kind.shape) == 2:
            for first, last, left, right in ((0, 5, 0, 4), (5, 9, 4, 8), (8, 10, 2, 3)):
                if last <= kind.shape[0] and right <= kind.shape[1]:
                    part = torch.empty(last - first, right - left)
                    opened.source.fill(name, Box((first, left), tuple(part.shape)), part)
                    assert torch.equal(part, whole[first:last, left:right])
    assert with_more_tokens(opened, 10) is opened


def test_only_the_model_of_a_folder_grows(tmp_path: Path) -> None:
    settings = CheckpointConfig(load=str(tmp_path), resize_vocabulary=True)
    assert any("has no config.json: drop it" in line for line in checkpoint_problems(settings))
    (tmp_path / "config.json").write_text("{}")
    assert list(checkpoint_problems(settings)) == []
