"""Small networks, data and trainings of megalite, in flags of pretrain_gpt.py, for entries of the museum."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from megalite.preprocessing.indexed_writer import IndexedDatasetWriter

END = 59
"""Token that ends a document, of --tokenizer-type NullTokenizer --vocab-size 59."""
MADE_UP = "--mock-data --tokenizer-type NullTokenizer --vocab-size 59 --seq-length 32 --max-position-embeddings 32"
FROM_FILES = MADE_UP.replace("--mock-data", "--data-path {data}/documents --split 1")
TRAINING = """--micro-batch-size 1 --global-batch-size 4 --train-iters 20 --eval-iters 0 --seed 11 --lr 0.01
--min-lr 0.001 --lr-decay-style cosine --weight-decay 0.1 --hidden-dropout 0 --attention-dropout 0"""
SIZES = "--hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4"
BLOCK = f"{SIZES} --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights"
GROUPS = "--group-query-attention --num-query-groups 2 --position-embedding-type rope"
DENSE = f"{BLOCK} {GROUPS} --num-layers 2"
EXPERTS = f"""{DENSE} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24
--moe-router-load-balancing-type none"""
BIASED = f"{SIZES} --num-layers 2"
MAMBA = f"""{BLOCK} {GROUPS} --hybrid-layer-pattern 'M-*-' --mamba-state-dim 8 --mamba-head-dim 8
--mamba-num-groups 2"""
GATED_DELTA = f"""{DENSE} --experimental-attention-variant gated_delta_net --linear-attention-freq 2
--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 8"""
LATENT = f"""{BLOCK} --num-layers 2 --multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8
--qk-pos-emb-head-dim 8 --v-head-dim 8 --qk-layernorm --position-embedding-type rope"""


def documents() -> list[np.ndarray]:
    """Return 40 documents of 5 to 30 random tokens, each with its end."""
    random = np.random.default_rng(5)
    return [np.append(random.integers(0, END, length), END) for length in random.integers(5, 30, 40)]


def write(prefix: Path, every: Iterable[np.ndarray]) -> None:
    """Write documents as an indexed dataset."""
    with IndexedDatasetWriter(prefix, np.dtype("<u2")) as writer:
        for tokens in every:
            writer.add_documents(tokens, np.array([len(tokens)]), np.array([1]))
        writer.finish()


def write_documents(folder: Path) -> None:
    """Write `documents` as folder/documents.bin and .idx."""
    write(folder / "documents", documents())
