"""New tokens in a second of CPU time, with the cache of keys and values, without it, and by transformers with its own.

    python -m benchmarks.generation [--rounds 5] [--prompt 256] [--new 32]

A Llama of random weights in fp32 on one thread, greedy. The ways take turns, round by round; figures are medians with
quartiles, ratios are of the same round. transformers (`pip install transformers`) is left out where it is not there.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.results import write_results
from megalite.config.model import ModelConfig
from megalite.inference.generation import generate
from megalite.inference.network import Network, logits, make_network
from megalite.inference.sampling import Sampling
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh

BATCH = 8
CONFIG = ModelConfig(
    num_layers=12, hidden_size=512, num_attention_heads=8, group_query_attention=True, num_query_groups=4,
    ffn_hidden_size=1536, swiglu=True, normalization="RMSNorm", position_embedding_type="rope", add_bias_linear=False,
    untie_embeddings_and_output_weights=True, vocab_size=32000,
)  # fmt: skip


def cached(network: Network, prompts: list[list[int]], new: int) -> None:
    for _ in generate(network, prompts, max_new_tokens=new, ends=(), sampling=Sampling(temperature=0.0)):
        pass


def uncached(network: Network, prompts: list[list[int]], new: int) -> None:
    tokens = torch.tensor(prompts)
    for _ in range(new):
        tokens = torch.cat([tokens, logits(network, tokens)[:, -1:].argmax(-1)], dim=1)


def transformers_model() -> Any:
    """The same sizes, or None."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        return None
    config = LlamaConfig(
        vocab_size=CONFIG.vocab_size, hidden_size=CONFIG.hidden_size, intermediate_size=CONFIG.ffn_size,
        num_hidden_layers=CONFIG.num_layers, num_attention_heads=CONFIG.num_attention_heads,
        num_key_value_heads=CONFIG.kv_groups, eos_token_id=None, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=32, help="tokens to generate")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    network, peer, new = make_network(CONFIG, ParallelMesh(), torch.float32), transformers_model(), arguments.new
    initialize(network.stage, seed=1)
    prompts = torch.randint(CONFIG.vocab_size, (BATCH, arguments.prompt)).tolist()
    ways: dict[str, tuple[int, Callable[[], object]]] = {
        "cached, one prompt": (new, lambda: cached(network, prompts[:1], new)),
        f"cached, {BATCH} prompts": (BATCH * new, lambda: cached(network, prompts, new)),
        "uncached, one prompt": (new, lambda: uncached(network, prompts[:1], new)),
    }
    if peer is not None:
        for name, batch in (("transformers, one prompt", prompts[:1]), (f"transformers, {BATCH} prompts", prompts)):
            tokens = torch.tensor(batch)
            ways[name] = (
                tokens.shape[0] * new,
                lambda tokens=tokens: peer.generate(  # type: ignore[misc]
                    tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new, do_sample=False
                ),
            )
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(arguments.rounds + 1):
        for name, (count, run) in ways.items():
            began = time.thread_time()
            run()
            if round_number > 0:
                speeds[name].append(count / (time.thread_time() - began))
    for name in [name for name in ways if name.startswith("cached")]:
        for other in ("uncached", "transformers"):
            if (pair := name.replace("cached", other)) in ways:
                ratios = [a / b for a, b in zip(speeds[name], speeds[pair], strict=True)]
                speeds[f"{name} / {other}"] = ratios
    figures = {name: statistics.quantiles(values, n=4) for name, values in speeds.items()}
    print(f"prompts of {arguments.prompt} tokens, {new} new ones; new tokens a second of CPU time, median [quartiles]")
    for name, (low, median, high) in figures.items():
        print(f"  {name:42} {median:7.2f} [{low:.2f}, {high:.2f}]")
    write_results("generation", {"prompt": arguments.prompt, "new": new, "quartiles": figures})


if __name__ == "__main__":
    main()
