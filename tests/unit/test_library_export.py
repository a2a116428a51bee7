"""Export of a model of one's own: a plain copy of the module loads it."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import megalite


class Tied(nn.Module):
    """Words in, words out, by one table; with statistics, and a frozen shift."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.out = nn.Embedding(7, 4), nn.BatchNorm1d(4), nn.Linear(4, 7, bias=False)
        self.out.weight, self.shift = self.table.weight, nn.Parameter(torch.randn(4), requires_grad=False)

    def forward(self, word: Tensor) -> Tensor:
        scores: Tensor = self.out(self.norm(self.table(word)) + self.shift)
        return scores


def test_a_plain_copy_loads_what_was_trained(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with megalite.Trainer(
        Tied(),
        loss=lambda scores, batch: nn.functional.cross_entropy(scores, batch),
        dataset=[torch.tensor(number % 7) for number in range(32)],
        optimizer=megalite.AdamW(lr=0.1),
        micro_batch_size=8,
        quiet=True,
    ) as run:
        run.train(steps=3)
        run.export(tmp_path / "exported")
        scored = run.evaluate([torch.tensor(number) for number in range(8 - 8 % 7)] + [torch.tensor(0)])["loss"]
    plain = Tied().eval()
    plain.load_state_dict(load_file(tmp_path / "exported/model.safetensors"))
    words = torch.tensor([*range(7), 0])
    with torch.no_grad():
        assert nn.functional.cross_entropy(plain(words), words).item() == torch.tensor(scored).item()
