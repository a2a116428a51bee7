"""A small GPT learns a made-up language, and then, by DPO (arXiv:2305.18290), which texts are preferred.

In the language, each letter is a neighbour in the alphabet of the one before it. Of two texts that begin alike, the one
that ends further up is preferred. At the end, the model agrees on at least 90 of 100 pairs that it has not seen.

python examples/preference/dpo.py, or, for example,
torchrun --standalone --max-restarts=0 --nproc-per-node 2 examples/preference/dpo.py zero=3
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

import megalite

LETTERS, LENGTH, PROMPT = 26, 16, 6
LANGUAGE_STEPS, DPO_STEPS, PAIRS, BETA = 60, 60, 32, 0.2


def texts(steps: Tensor) -> Tensor:
    """Return the texts that go by these steps, +1 or -1, from the middle of the alphabet."""
    return (LETTERS // 2 + steps.cumsum(-1)) % LETTERS


def random_steps(*shape: int, seed: int) -> Tensor:
    return 2 * torch.randint(2, shape, generator=torch.Generator().manual_seed(seed)) - 1


def make_pairs(count: int, seed: int) -> dict[str, Tensor]:
    """Return texts [pairs, 2, LENGTH], of which the first is preferred, and which labels are after the prompt."""
    steps = random_steps(count, 2, LENGTH, seed=seed)
    steps[:, 1, :PROMPT] = steps[:, 0, :PROMPT]
    steps = steps[steps[:, 0].sum(-1) != steps[:, 1].sum(-1)]
    steps = torch.where((steps[:, 0].sum(-1) > steps[:, 1].sum(-1))[:, None, None], steps, steps.flip(1))
    mask = torch.zeros(steps.shape)
    mask[..., PROMPT - 1 : -1] = 1.0  # label n is the text's token n + 1; the last label is none
    return {"tokens": texts(steps), "loss_mask": mask}


def margins(log_probabilities: Tensor, fields: dict[str, Tensor]) -> Tensor:
    """Return how much likelier than for the reference the preferred text of each pair is, relative to the other."""
    gains = ((log_probabilities - fields["reference"]) * fields["loss_mask"]).sum(-1)
    return gains[0::2] - gains[1::2]


def dpo_loss(outputs, fields: dict[str, Tensor]) -> dict[str, Tensor]:
    found = margins(outputs.log_probabilities, fields)
    return {"loss": -logsigmoid(BETA * found).sum(), "accuracy": (found > 0).sum()}


language = [{"tokens": text} for text in texts(random_steps(4096, LENGTH, seed=0))]
run = megalite.Trainer(
    megalite.GPTConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        vocab_size=LETTERS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    ),
    dataset=language,
    seq_length=LENGTH,
    micro_batch_size=16,
    global_batch_size=64,
    optimizer=megalite.AdamW(lr=2e-3),
    layout=megalite.Layout(**{name: int(size) for name, size in (word.split("=") for word in sys.argv[1:])}),
)
run.train(steps=LANGUAGE_STEPS)

reference = run.reference()


def own_batch(pairs: dict[str, Tensor], first: int, last: int) -> dict[str, Tensor]:
    """Return this rank's share of some pairs: their texts one after the other, [2 x pairs, LENGTH]."""
    batch = {name: run.share(values[first:last]).flatten(0, 1) for name, values in pairs.items()}
    return {**batch, "reference": reference(batch)}


pairs, others = make_pairs(4096, seed=1), make_pairs(512, seed=2)
for step in range(DPO_STEPS):
    batch = own_batch(pairs, PAIRS * step, PAIRS * (step + 1))
    run.forward_backward(batch, dpo_loss, count=lambda fields: len(fields["tokens"]) // 2)
    record = run.optimizer_step()
    if run.rank == 0 and step % 10 == 9:
        print(f"DPO step {step + 1} | loss {record['loss']:.4f} | accuracy {record['accuracy']:.4f}")

batch = own_batch(others, 0, 400)
agreement = run.mean((margins(run.logprobs(batch), batch) > 0).float().mean())
if run.rank == 0:
    print(f"the model prefers what is preferred in {agreement:.1%} of 400 other pairs")
assert agreement >= 0.9
