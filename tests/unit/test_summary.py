"""Messages at the start of a run about effects of its layout."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megalite.config import parse_arguments
from megalite.config.model import ModelConfig
from megalite.errors import ConfigurationError
from megalite.parallel.attention_plan import FirstKeys
from megalite.parallel.sequence import SequenceLayout
from megalite.tasks.summary import _context, masks_of_an_operator
from megalite.training.batches import Cutting
from megalite.training.kernels import drops_by_rank, require_equal_dropout

MODEL = ModelConfig(num_layers=1, hidden_size=16, num_attention_heads=4, attention_dropout=0.1)
GPU, CPU = torch.device("cuda"), torch.device("cpu")


def test_an_operator_that_draws_its_own_masks_is_named() -> None:
    (line,) = masks_of_an_operator(MODEL, GPU, torch.bfloat16).values()
    assert "scaled_dot_product_attention" in str(line)


def test_dropout_of_sparse_attention_follows_the_rule_and_is_said_to_be_slow_on_a_gpu() -> None:
    sparse = replace(MODEL, num_layers=2, hybrid_layer_pattern="D-")
    (line,) = masks_of_an_operator(sparse, GPU, torch.bfloat16).values()
    assert "drawn on the host" in str(line)
    assert masks_of_an_operator(sparse, CPU, torch.bfloat16) == {}
    assert not drops_by_rank(sparse, GPU, torch.bfloat16)
    assert drops_by_rank(replace(MODEL, num_layers=4, hybrid_layer_pattern="D-+-"), GPU, torch.bfloat16)


@pytest.mark.parametrize(
    ("model", "device", "dtype"),
    [
        (replace(MODEL, attention_dropout=0.0), GPU, torch.bfloat16),
        (MODEL, CPU, torch.bfloat16),
        (MODEL, GPU, torch.float64),
        (replace(MODEL, attn_logit_softcapping=2.0), GPU, torch.float32),
        (replace(MODEL, softmax_type="learnable"), GPU, torch.bfloat16),
    ],
    ids=["without dropout", "on a CPU", "float64", "capped scores", "sinks"],
)
def test_what_follows_the_rule_is_not(model: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
    assert masks_of_an_operator(model, device, dtype) == {}


RUN = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 4 --seq-length 4096 --max-position-embeddings 4096 "
    "--micro-batch-size 1 --lr 1e-3 --train-iters 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 9"
)


@pytest.mark.parametrize("way", ["p2p", "all_gather", "a2a", "a2a+p2p --hierarchical-context-parallel-sizes 2 2"])
def test_dropout_that_depends_on_the_ranks_is_refused(way: str) -> None:
    config = parse_arguments(f"{RUN} --bf16 --attention-dropout 0.25 --cp 4 --cp-comm-type {way}".split()).config
    with pytest.raises(ConfigurationError) as raised:
        require_equal_dropout(config, GPU)
    (line,) = str(raised.value).splitlines()
    assert line.startswith("--attention-dropout 0.25 with --context-parallel-size 4: ")
    assert line.endswith("give --attention-dropout 0")


@pytest.mark.parametrize(
    ("flags", "device"),
    [
        ("--bf16 --attention-dropout 0.1 --cp 1", GPU),
        ("--bf16 --attention-dropout 0 --cp 2", GPU),
        ("--fp64 --attention-dropout 0.1 --cp 2", GPU),
        ("--bf16 --attention-dropout 0.1 --cp 2 --attn-logit-softcapping 50", GPU),
        ("--bf16 --attention-dropout 0.1 --cp 2", CPU),
    ],
    ids=["one rank", "without dropout", "float64", "capped scores", "on a CPU"],
)
def test_dropout_that_is_equal_on_all_ranks_is_not(flags: str, device: torch.device) -> None:
    require_equal_dropout(parse_arguments(f"{RUN} {flags}".split()).config, device)


def context_line(cutting: Cutting, flags: str) -> str:
    trainer: Any = SimpleNamespace(cutting=cutting, config=parse_arguments(f"{RUN} {flags}".split()).config)
    return " ".join(map(str, _context(trainer).values()))


def test_a_rank_has_its_share_of_tokens_and_of_scores() -> None:
    assert context_line(Cutting(), "") == ""
    assert context_line(Cutting(4, 1), "--cp 4") == (
        "1,024 of 4,096 tokens per rank in 2 chunks, by p2p; the busiest rank computes 1.000 x the mean scores"
    )
    # A network of recurrent layers and MLPs, with documents.
    recurrent = Cutting(4, 1, layers={})
    assert context_line(recurrent, "--cp 4 --reset-attention-mask").endswith("by p2p; no layer computes scores")
    ways = "--cp-comm-type p2p all_gather p2p all_gather"
    assert "in 2 chunks, by p2p, all_gather;" in context_line(Cutting(4, 1), f"--cp 4 {ways}")
    documents = "--reset-attention-mask --cp-balance documents"
    assert context_line(Cutting(4, 1, 16), f"--cp 4 {documents}").endswith(
        "in 16 chunks, by p2p; the busiest rank computes 1.000 x the mean scores without documents; with them, see "
        "busiest_context_parallel_rank in metrics.jsonl"
    )


def test_the_busiest_rank_is_that_of_each_micro_batch() -> None:
    """The first of two documents is 6 of 8 tokens. In chunks of 2, it has 3 + 7 + 11 scores, and the other one 3."""
    documents = np.array([0, 0, 0, 0, 0, 0, 6, 6])
    first = FirstKeys(documents, documents)
    cutting = Cutting(2, 0)
    layout = cutting.layout(8, first)
    assert cutting.loads(layout, first) == [6, 18]
    cut: Any = SimpleNamespace(layout=layout, bounds=first)
    whole: Any = SimpleNamespace(layout=layout, bounds=FirstKeys())
    assert cutting.busiest([cut]) == (18, 12)
    assert cutting.busiest([cut, whole]) == (18 + 18, 12 + 18)
    assert Cutting(2, 0, layers={(None, 1): 1, (0, 1): 3}).loads(layout, FirstKeys()) == [18 + 3 * 8, 18 + 3 * 8]
    # Ranks that exchange heads share the scores of all: the documents of one rank's chunks do not matter.
    uneven = FirstKeys(np.array([0, 0, 0, 0, 4, 5, 6, 7]), np.array([0, 0, 0, 0, 4, 5, 6, 7]))
    neighbours = SequenceLayout(8, ((range(4),), (range(4, 8),)))
    assert Cutting(2, 0).loads(neighbours, uneven) == [10, 16]
    assert Cutting(2, 0, layers={(None, 2): 1}).loads(neighbours, uneven) == [13, 13]
