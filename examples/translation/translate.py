"""An encoder-decoder learns to write numbers in words: at least 95 of 100 that it has not seen, greedily decoded.

python examples/translation/translate.py, or with pp=2 or pp=4 on so many ranks, for example
torchrun --standalone --max-restarts=0 --nproc-per-node 2 examples/translation/translate.py pp=2
"""

from __future__ import annotations

import sys

import torch
from number_words import DIGITS, LENGTH, WORDS, samples
from torch import Tensor, nn

import megalite


class Encoder(nn.TransformerEncoderLayer):
    def __init__(self) -> None:
        super().__init__(64, 4, 256, dropout=0.0, batch_first=True, norm_first=True)
        self.embedding, self.places = nn.Embedding(10, 64), nn.Parameter(torch.randn(DIGITS, 64))

    def forward(self, digits: Tensor) -> dict[str, Tensor]:
        return {"memory": super().forward(self.embedding(digits) + self.places)}  # named, for all later stages


class Begin(nn.Embedding):
    def forward(self, words: Tensor) -> Tensor:  # not from the stage before: a field of the batch
        return super().forward(words[:, :-1])


class Decoder(nn.TransformerDecoderLayer):
    def forward(self, hidden: Tensor, memory: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, hidden.device, hidden.dtype)
        return super().forward(hidden, memory, mask, tgt_is_causal=True)


def right(scores: Tensor, batch: dict[str, Tensor]) -> Tensor:  # each word is the likeliest: greedy decoding writes it
    return (scores.argmax(-1) == batch["words"][:, 1:]).all(1).sum()


torch.manual_seed(0)
decoders = [Decoder(64, 4, 256, dropout=0.0, batch_first=True, norm_first=True) for _ in range(3)]
data = samples(20_000, seed=1)
run = megalite.Trainer(
    stages=[Encoder(), Begin(len(WORDS), 64), *decoders, nn.Linear(64, len(WORDS))],
    loss=lambda scores, batch: nn.functional.cross_entropy(scores.flatten(0, 1), batch["words"][:, 1:].flatten()),
    metrics={"accuracy": right},
    dataset=data[512:],
    valid_dataset=data[:512],
    micro_batch_size=32,
    global_batch_size=64,
    optimizer=megalite.AdamW(lr=2e-3, clip_grad=1.0, schedule="cosine", steps=100),
    layout=megalite.Layout(**{name: int(size) for name, size in (word.split("=") for word in sys.argv[1:])}),
)
run.train(steps=100)
assert run.evaluate()["accuracy"] >= 0.95
