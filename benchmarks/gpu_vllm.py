"""Check of `megalite.VLLMReceiver` against vLLM itself, on a machine with two GPUs:

    pip install vllm && python -m benchmarks.gpu_vllm

vLLM starts on the second GPU with weights of its own. Twice, a small Llama takes a step on the first GPU and sends its
weights over NCCL, and vLLM's log-probabilities of a prompt must be those of training, but for bf16. The exit code is 0
where they are, 1 where not, and 2 where nothing was checked. It has been run with a stand-in only.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import megalite

TOLERANCE = 0.05
"""Largest difference of log-probabilities of about -6: both sides round to bf16, in different operations."""
ROUNDS, SAMPLES, LENGTH, VOCABULARY = 2, 2, 32, 512
PORT = 29613
Score = Callable[[list[list[int]]], Tensor]
"""Log-probabilities of each token but the first, [samples, length - 1], by an engine."""


def make_run(*, bf16: bool = True) -> megalite.Trainer:
    """Return a Llama of two layers, of a size that every engine takes."""
    config = megalite.GPTConfig(
        num_layers=2,
        hidden_size=256,
        num_attention_heads=4,
        ffn_hidden_size=512,
        vocab_size=VOCABULARY,
        position_embedding_type="rope",
        normalization="RMSNorm",
        swiglu=True,
        add_bias_linear=False,
        untie_embeddings_and_output_weights=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    optimizer = megalite.AdamW(lr=1e-2)
    precision = "bf16" if bf16 else "fp32"
    return megalite.Trainer(
        config, seq_length=LENGTH, micro_batch_size=SAMPLES, optimizer=optimizer, precision=precision, quiet=True
    )


def compare(run: megalite.Trainer, receiver: Any, score: Score) -> float:
    """Return the largest difference of log-probabilities, after each of the rounds of a step and an export."""
    generator, worst = torch.Generator().manual_seed(1), 0.0
    tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=generator)  # also to find what a cache keeps
    for _ in range(ROUNDS):
        mask = torch.ones(SAMPLES, LENGTH)
        mask[:, -1] = 0.0  # its label is the first token
        batch = {"tokens": tokens, "labels": tokens.roll(-1, dims=1), "loss_mask": mask}
        run.forward_backward(batch, lambda outputs, fields: -(outputs.log_probabilities * fields["loss_mask"]).sum())
        run.optimizer_step()
        run.export_weights(receiver)
        ours, theirs = run.logprobs(batch)[:, :-1].float().cpu(), score(tokens.tolist())
        worst = max(worst, (ours - theirs).abs().max().item())
    return worst


def main() -> int:
    if importlib.util.find_spec("vllm") is None or torch.cuda.device_count() < 2:
        print("nothing was checked: this needs two GPUs and vLLM (pip install vllm)", file=sys.stderr)
        return 2
    run = make_run()
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"  # of the engine's process; this one has its GPU already
    from vllm import LLM, SamplingParams
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer.nccl_common import stateless_init_process_group

    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory) / "model"
        run.export_weights(folder)
        engine = LLM(
            model=str(folder),
            load_format="dummy",  # other weights than those of the folder
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enforce_eager=True,
            gpu_memory_utilization=0.2,
            weight_transfer_config=WeightTransferConfig(backend="nccl"),
        )

    def connect() -> Callable[[Tensor], object]:
        group = stateless_init_process_group("127.0.0.1", PORT, 0, 2, torch.device("cuda", 0))
        return lambda tensor: group.broadcast(tensor, src=0)

    def score(samples: list[list[int]]) -> Tensor:
        prompts = [{"prompt_token_ids": tokens} for tokens in samples]
        found = engine.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0))
        return torch.tensor(
            [
                [
                    by_token[token].logprob
                    for by_token, token in zip(output.prompt_logprobs[1:], tokens[1:], strict=True)
                ]
                for output, tokens in zip(found, samples, strict=True)
            ]
        )

    where = {"master_address": "127.0.0.1", "master_port": PORT, "rank_offset": 1, "world_size": 2}
    worst = compare(run, megalite.VLLMReceiver(engine, connect, where), score)
    print(f"gpu_vllm: log-probabilities differ by at most {worst:.3g}; {TOLERANCE} is tolerated")
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
