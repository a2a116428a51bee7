"""A small GPT learns by GRPO (arXiv:2402.03300) to sort three digits: a task whose answers a program can verify.

Examples teach it first, until some answers are right; then rewards alone do. At the end, the mean reward of 256 other
prompts is at least 0.9, where each right answer is 1.

python examples/grpo/grpo.py, or, for example,
torchrun --standalone --max-restarts=0 --nproc-per-node 2 examples/grpo/grpo.py pp=2
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

import megalite

DIGITS, SORT, END, LENGTH = 3, 10, 11, 8  # a text: three digits, SORT, the same digits in order, END
EXAMPLE_STEPS, GRPO_STEPS = 80, 80
PROMPTS, ANSWERS, CLIP = 32, 8, 0.2  # prompts per step, the answers to each, and how far a probability may move


def prompt(number: int) -> list[int]:
    return [*map(int, f"{number:0{DIGITS}}"), SORT]


def answer(prompt: list[int]) -> list[int]:
    return [*sorted(prompt[:DIGITS]), END]


def rewards(rollouts) -> Tensor:
    return torch.tensor([float(list(each.tokens) == answer(list(each.prompt))) for each in rollouts])


def grpo_loss(outputs, fields: dict[str, Tensor]) -> Tensor:
    ratio = (outputs.log_probabilities - fields["generated_logprobs"]).exp()
    gains = fields["advantage"][:, None] * torch.stack([ratio, ratio.clamp(1 - CLIP, 1 + CLIP)])
    return -(gains.amin(0) * fields["loss_mask"]).sum()


numbers = torch.randperm(10**DIGITS, generator=torch.Generator().manual_seed(0)).tolist()
examples = [{"tokens": torch.tensor(prompt(n) + answer(prompt(n)))} for n in numbers[:256]]
run = megalite.Trainer(
    megalite.GPTConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        vocab_size=12,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    ),
    dataset=examples,
    seq_length=LENGTH,
    micro_batch_size=64,
    global_batch_size=128,
    optimizer=megalite.AdamW(lr=1e-3, clip_grad=1.0),
    layout=megalite.Layout(**{name: int(size) for name, size in (word.split("=") for word in sys.argv[1:])}),
)
run.train(steps=EXAMPLE_STEPS)

for step in range(run.iteration - EXAMPLE_STEPS, GRPO_STEPS):  # with save=..., a stopped run goes on where it was
    first = 256 + PROMPTS * step % 480
    prompts = run.share([prompt(n) for n in numbers[first : first + PROMPTS]]) * ANSWERS
    rollouts = run.generate(prompts, max_new_tokens=DIGITS + 1, eod=END)
    batch, found = run.rollout_batch(rollouts), rewards(rollouts)
    groups = found.view(ANSWERS, -1)
    batch["advantage"] = ((groups - groups.mean(0)) / (groups.std(0) + 1e-6)).flatten()
    run.forward_backward(batch, grpo_loss)
    record = run.optimizer_step(reward=found.mean(), **run.compare_logprobs(batch))
    if run.rank == 0 and step % 10 == 9:
        print(f"GRPO step {step + 1} | reward {record['reward']:.3f} | KL {record['log_probability_kl']:.2e}")

others = run.share([prompt(n) for n in numbers[-256:]])
reward = run.mean(rewards(run.generate(others, max_new_tokens=DIGITS + 1, eod=END, temperature=0.0)).mean())
if run.rank == 0:
    print(f"the mean reward of 256 other prompts is {reward:.3f}")
assert reward >= 0.8  # which texts are sampled depends on rounding, and so on the CPU
