"""Golden losses: 50 steps of each family on mock data, and of a Llama with rounded operands, committed as numbers.

They change only on purpose: `python -m tests.end_to_end.golden --write` writes new ones, and the commit explains why.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch

from megalite.config.model import ModelConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.data.mock_dataset import MockDataset
from megalite.model.batch import MicroBatch
from megalite.model.gpt import GPT
from megalite.optim.buckets import DataParallel
from megalite.optim.learning_rate import LearningRateSchedule, Rates
from megalite.optim.optimizer import make_optimizer
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.randomness import RandomKey
from megalite.parallel.rounded_products import UNROUNDED, Rounding, Roundings
from megalite.pipeline.engine import PipelineEngine
from megalite.pipeline.lowering import Reductions
from megalite.pipeline.proved_schedules import ProvedSchedules
from megalite_kernels.recipes import recipe
from tests.harness.stages import LOSS

DIRECTORY = Path(__file__).with_suffix("")
STEPS, BATCH, SEQUENCE, VOCABULARY, SEED = 50, 8, 32, 61, 1234
DTYPES = ("float64", "float32")

# No dropout: torch's masks depend on the kind of processor.
GPT2 = ModelConfig(
    num_layers=2, hidden_size=32, num_attention_heads=4, max_position_embeddings=SEQUENCE, vocab_size=VOCABULARY,
    hidden_dropout=0.0, attention_dropout=0.0,
)  # fmt: skip
LLAMA = replace(
    GPT2, position_embedding_type="rope", normalization="RMSNorm", swiglu=True, ffn_hidden_size=88,
    add_bias_linear=False, untie_embeddings_and_output_weights=True, group_query_attention=True, num_query_groups=2,
    qk_layernorm=True,
)  # fmt: skip
HYBRID = replace(
    LLAMA, num_layers=6, hybrid_layer_pattern="M*-GM-", position_embedding_type="none", mamba_head_dim=16,
    mamba_num_groups=2, mamba_state_dim=8, mamba_chunk_size=12, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=8, linear_value_head_dim=16, linear_chunk_size=8,
)  # fmt: skip
"""Chunks of 12 do not divide the samples of 32 tokens; chunks of 8 do."""
NEMOTRON_H = replace(
    HYBRID, num_layers=5, hybrid_layer_pattern="M-M*-", swiglu=False, squared_relu=True, ffn_hidden_size=64,
    qk_layernorm=False, mamba_dt_min=1e-3, linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128,
    linear_value_head_dim=128, linear_chunk_size=64,
)  # fmt: skip
QWEN_3_5 = replace(
    LLAMA, num_layers=6, hybrid_layer_pattern="G-G-*-", apply_layernorm_1p=True, attention_output_gate=True,
    rotary_percent=0.25, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
    linear_value_head_dim=16, linear_chunk_size=8,
)  # fmt: skip
LFM2 = replace(LLAMA, num_layers=6, hybrid_layer_pattern="L-L-*-", untie_embeddings_and_output_weights=False)
DEEPSEEK_V3 = replace(
    LLAMA, group_query_attention=False, num_query_groups=1, multi_latent_attention=True, q_lora_rank=12,
    kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=6, latent_norm_epsilon=1e-6,
    position_embedding_type="yarn", rotary_scaling_factor=4.0, yarn_original_max_position_embeddings=16,
    mscale_all_dim=1.0,
)  # fmt: skip
DEEPSEEK_V32 = replace(
    DEEPSEEK_V3, experimental_attention_variant="dsa", dsa_indexer_n_heads=3, dsa_indexer_head_dim=8,
    dsa_indexer_topk=8, dsa_indexer_loss_coeff=1.0, dsa_indexer_use_sparse_loss=True, dsa_indexer_k_norm_epsilon=1e-6,
)  # fmt: skip
FAMILIES = {
    "gpt2": GPT2, "llama": LLAMA, "hybrid": HYBRID, "nemotron-h": NEMOTRON_H, "qwen3.5": QWEN_3_5, "lfm2": LFM2,
    "deepseek-v3": DEEPSEEK_V3, "deepseek-v3.2": DEEPSEEK_V32,
}  # fmt: skip
"""Without experts: a choice that is as good as even would depend on the kind of processor."""

RECIPES = {
    "tensorwise": Rounding(recipe("tensorwise")),
    "tensorwise, hybrid, weight gradients": Rounding(recipe("tensorwise", "hybrid"), weight_gradients=True),
    "blockwise": Rounding(recipe("blockwise")),
    "blockwise, weight gradients": Rounding(recipe("blockwise"), weight_gradients=True),
    "blockwise, activations again": Rounding(recipe("blockwise"), stores_activations=True),
    "mxfp8": Rounding(recipe("mxfp8"), weight_gradients=True),
    "nvfp4": Rounding(recipe("nvfp4")),
}
"""Roundings of all layers of a Llama. In float64, since what bf16 rounds depends on the processor."""


def rounded_losses(way: str, dtype: torch.dtype) -> list[float]:
    """Return the losses of a Llama with one of `RECIPES`."""
    return losses(LLAMA, dtype, Roundings((RECIPES[way],) * LLAMA.num_layers))


def dtypes(family: str) -> tuple[str, ...]:
    """Return the dtypes of a family. In float32, which keys an indexer chooses would depend on the processor, too."""
    return ("float64",) if FAMILIES[family].dsa_indexer_topk is not None else DTYPES


def losses(config: ModelConfig, dtype: torch.dtype, roundings: Roundings = UNROUNDED) -> list[float]:
    """Return the mean loss of each step, on one process with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _train(config, dtype, roundings)
    finally:
        torch.set_num_threads(threads)


def _train(config: ModelConfig, dtype: torch.dtype, roundings: Roundings) -> list[float]:
    mesh = ParallelMesh()
    network = GPT(config, mesh, dtype=dtype, roundings=roundings)
    initialize(network, SEED)
    optimizer = make_optimizer([network], mesh, OptimizerConfig(lr=0.0), DataParallel(gradient_dtype=dtype))
    schedule = LearningRateSchedule(
        maximum=1e-2, minimum=1e-3, warmup_samples=5 * BATCH, decay_samples=STEPS * BATCH, style="cosine"
    )
    dataset = MockDataset(VOCABULARY, SEQUENCE, SEED, STEPS * BATCH)
    engine, actions = PipelineEngine([network]), ProvedSchedules(reductions=Reductions()).prove([2]).training(2)
    means = []
    for step in range(STEPS):
        halves = [micro_batch(dataset, step * BATCH + half, dtype) for half in (0, BATCH // 2)]
        optimizer.begin_step(len(halves))
        count = BATCH * SEQUENCE
        factors = {term.name: term.weight / count for term in network.loss_terms}
        sums = engine.run(actions, halves, factors, optimizer)
        rate = schedule.at(step * BATCH)
        optimizer.step(Rates(rate, rate, weight_decay=0.01))
        means.append(sums[LOSS].item() / count)
    return means


def micro_batch(dataset: MockDataset, first: int, dtype: torch.dtype) -> MicroBatch:
    text = torch.stack([torch.from_numpy(dataset[sample]) for sample in range(first, first + BATCH // 2)])
    return MicroBatch(
        tokens=text[:, :-1],
        positions=torch.arange(SEQUENCE).expand(len(text), -1),
        first_keys=None,
        labels=text[:, 1:],
        loss_mask=torch.ones(len(text), SEQUENCE, dtype=dtype),
        key=RandomKey(SEED, tuple(range(first, first + len(text)))),
    )


def read(family: str) -> dict[str, list[float]]:
    """Return the committed losses of a family by dtype, or those of "recipes" by recipe."""
    committed: dict[str, list[float]] = json.loads((DIRECTORY / f"{family}.json").read_text())
    return committed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="replace the committed losses by this machine's")
    write = parser.parse_args().write
    for family, config in FAMILIES.items():
        now = {dtype: losses(config, getattr(torch, dtype)) for dtype in dtypes(family)}
        _compare(family, now, write=write)
        if "float32" not in now:
            continue
        drift = max(abs(a - b) / b for a, b in zip(now["float32"], now["float64"], strict=True))
        print(f"{family}: float32 drifts from float64 by {drift:.2g}")
    _compare("recipes", {way: rounded_losses(way, torch.float64) for way in RECIPES}, write=write)


def _compare(name: str, now: dict[str, list[float]], *, write: bool) -> None:
    """Print how far losses are from the committed ones, which they replace if they are to be written."""
    if write:
        (DIRECTORY / f"{name}.json").write_text(json.dumps(now, indent=1) + "\n")
    committed = read(name)
    for key in now:
        furthest = max(abs(a - b) / b for a, b in zip(now[key], committed[key], strict=True))
        course = f"loss {now[key][0]:.4f} to {now[key][-1]:.4f}"
        print(f"{name} {key}: {course}, furthest from the committed ones by {furthest:.2g} of them")


if __name__ == "__main__":
    main()
