"""Networks with sparse attention in checkpoints: which of their flags make another function, and which do not."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from megalite.checkpoint import check_same_function, indexers_agree, same_depths
from megalite.checkpoint.compatibility import function_of
from megalite.config import ModelConfig
from megalite.config.kinds.sparse_attention import without_indexers
from megalite.conversion.opened import tensors_of_indexers, tensors_of_training
from megalite.errors import CheckpointError

DENSE = ModelConfig(
    num_layers=3,
    hidden_size=16,
    num_attention_heads=2,
    vocab_size=11,
    multi_latent_attention=True,
    position_embedding_type="rope",
    mtp_num_layers=1,
)
MODEL = replace(
    DENSE,
    experimental_attention_variant="dsa",
    dsa_indexer_n_heads=4,
    dsa_indexer_head_dim=64,
    dsa_indexer_topk=3,
    dsa_indexer_topk_freq=2,
)
PATTERN = replace(
    MODEL, dsa_indexer_topk_freq=4, num_layers=6, hybrid_layer_pattern="D-D-D-", mtp_hybrid_override_pattern="D-"
)


@pytest.mark.parametrize(
    "changes",
    [
        {"dsa_indexer_loss_coeff": 0.5, "dsa_indexer_use_sparse_loss": True},
        {"dsa_stage": "warmup"},
        {"dsa_indexer_skip_topk_offset": 1},
        {"dsa_indexer_k_norm_epsilon": 1e-5},
    ],
)
def test_a_stage_and_other_words_are_the_same_network(changes: dict[str, Any]) -> None:
    check_same_function("it", MODEL, replace(MODEL, **changes))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dsa_indexer_n_heads", 5),
        ("dsa_indexer_head_dim", 66),
        ("dsa_indexer_rope_interleaved", True),
        ("dsa_indexer_scoring_relu", False),
        ("dsa_indexer_k_norm_epsilon", 1e-6),
    ],
)
def test_what_an_indexer_computes_is_of_the_network(field: str, value: object) -> None:
    other = replace(MODEL, **{field: value})
    with pytest.raises(CheckpointError, match=rf"\n  {field}: .* in the checkpoint, {value} in this run$"):
        check_same_function("it", MODEL, other)
    assert not indexers_agree(MODEL, other)
    assert function_of(replace(DENSE, **{field: value})) == function_of(DENSE)


def test_another_number_of_keys_is_another_network_with_the_same_indexers() -> None:
    other = replace(MODEL, dsa_indexer_topk=4)
    with pytest.raises(CheckpointError, match=r"dsa_indexer_topk: .*, 4 in this run\n  \(--finetune goes on with"):
        check_same_function("it", MODEL, other)
    assert indexers_agree(MODEL, other)


def test_layers_that_choose_are_of_the_network() -> None:
    check_same_function("it", MODEL, PATTERN)
    check_same_function("it", MODEL, replace(MODEL, dsa_indexer_skip_topk_offset=1, dsa_indexer_topk_freq=2))
    for every, offset in ((1, 0), (3, 0), (2, 2)):
        other = replace(MODEL, dsa_indexer_topk_freq=every, dsa_indexer_skip_topk_offset=offset)
        with pytest.raises(
            CheckpointError, match=r"dsa_indexer_topk_freq: \[True, False, True\] in the checkpoint, \["
        ):
            check_same_function("it", MODEL, other)
        assert indexers_agree(MODEL, other)


@pytest.mark.parametrize("model", [MODEL, PATTERN])
def test_a_network_without_indexers_has_the_same_names(model: ModelConfig) -> None:
    dense = without_indexers(model)
    assert "sparse_attention" not in dense.kinds
    assert not [
        name for name, value in asdict(dense).items() if name.startswith("dsa_") and value != asdict(DENSE)[name]
    ]
    assert tensors_of_training(dense).keys() == tensors_of_training(model).keys() - tensors_of_indexers(model)
    layers = {name.partition(".latent_attention.indexer.")[0] for name in tensors_of_indexers(model)}
    assert layers == {"layers.0", "layers.2", "mtp.0.layers.0"}
    assert tensors_of_indexers(dense) == set()
    assert same_depths(dense, model)
    assert indexers_agree(dense, model)
    with pytest.raises(CheckpointError, match=r"\(--finetune leaves out indexers that the run lacks"):
        check_same_function("it", dense, model)
