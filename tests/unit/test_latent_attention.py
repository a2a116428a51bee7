"""Latent attention on one rank: the two ways to attend with a cache, what is kept, and which way is chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megalite.config.kinds.table import KINDS
from megalite.config.model import ModelConfig
from megalite.inference.generation import next_token_logits
from megalite.inference.network import Network, make_network
from megalite.model.batch import LayerContext
from megalite.model.cache import StageCache
from megalite.model.gpt import GPT
from megalite.model.latent_attention import LatentAttention, LatentCache, LatentSizes
from megalite.model.norm import RMSNorm
from megalite.model.sample_mask import SampleMask
from megalite.parallel.attention_plan import FirstKeys
from megalite.parallel.context import ParallelContext
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh, UnconnectedMesh
from megalite.parallel.parameter import named_pieces
from megalite.parallel.randomness import RandomKey
from megalite.parallel.sequence import SequenceLayout, zigzag
from tests.distributed.layout_cell import Cell, model_config

SIZES = {"narrow": "narrow values", "wide": "wide values", "equal": "equal"}
ROW = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def made(latents: str, **options: object) -> Network:
    cell = Cell("llama", latents=SIZES[latents], qk_layernorm=True, **options)  # type: ignore[arg-type]
    network = make_network(model_config(cell), ParallelMesh(), torch.float64)
    initialize(network.stage, 5)
    return network


def decoded(network: Network) -> tuple[Tensor, StageCache]:
    """Return the logits of each token of a row: the first half at once, the others one by one."""
    cache, rows, start = StageCache(len(ROW)), [], 0
    for stop in [len(ROW) // 2, *range(len(ROW) // 2 + 1, len(ROW) + 1)]:
        logits = next_token_logits(network, [ROW[start:stop]], [start], cache)
        assert logits is not None
        rows.append(logits[0])
        start = stop
    return torch.stack(rows), cache


@pytest.mark.parametrize("latents", SIZES)
def test_absorbed_and_written_out_are_the_same(latents: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for absorbed in (True, False):
        monkeypatch.setattr(LatentAttention, "absorbing_is_less", lambda *_, absorbed=absorbed: absorbed)
        found.append(decoded(made(latents, yarn=latents == "wide", output_gate=latents == "equal"))[0])
    assert (found[0] - found[1]).abs().max() <= 1e-12 * found[1].abs().max()


def test_scores_are_capped_in_both(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for absorbed in (True, False):
        monkeypatch.setattr(LatentAttention, "absorbing_is_less", lambda *_, absorbed=absorbed: absorbed)
        network = made("narrow")
        for layer in network.stage.layers:
            layer.attention.sizes = layer.attention.sizes.__class__(**{**vars(layer.attention.sizes), "cap": 0.05})
            layer.attention.core = layer.attention.core.__class__(**{**vars(layer.attention.core), "cap": 0.05})
        found.append(decoded(network)[0])
    assert (found[0] - found[1]).abs().max() <= 1e-12 * found[1].abs().max()
    assert (found[0] - decoded(made("narrow"))[0]).abs().max() > 1e-6


def test_the_cache_has_latents_and_rotated_keys_alone() -> None:
    network = made("narrow")
    _, cache = decoded(network)
    caches = [each for each in cache._layers.values() if isinstance(each, LatentCache)]
    assert len(caches) == len(network.stage.layers)
    config = network.stage.config
    for each in caches:
        assert each._kept is not None
        assert each._kept.numel() == len(ROW) * (config.kv_lora_rank + config.qk_pos_emb_head_dim)


def test_few_tokens_over_many_are_absorbed_and_a_prompt_is_not() -> None:
    config = ModelConfig(
        num_layers=1, hidden_size=64, num_attention_heads=16, vocab_size=8, multi_latent_attention=True,
        q_lora_rank=None, kv_lora_rank=512, position_embedding_type="rope",
    )  # fmt: skip
    layer = GPT(config, ParallelMesh()).layers[0].attention
    assert isinstance(layer, LatentAttention)
    assert layer.absorbing_is_less(1, 2048)
    assert layer.absorbing_is_less(8, 100)
    assert not layer.absorbing_is_less(2048, 2048)


def sent(axis: str, sizes: LatentSizes) -> dict[str, int]:
    """Return the bytes of each collective of a forward, of one of two ranks without processes along an axis."""
    size = {f"{'tensor' if axis == 'tp' else 'context'}_parallel_size": 2}
    mesh = UnconnectedMesh(rank=0, world_size=2, **size)  # type: ignore[arg-type]
    context = ParallelContext(mesh, sequence_parallel=axis == "tp")
    layer, length = LatentAttention(context, "latents", sizes, norm=RMSNorm), 16
    initialize(layer, 1)
    layout = SequenceLayout.cut(length, zigzag(mesh.size("cp")), mesh.coordinate("cp"))
    mask = None
    if axis == "cp":
        first = torch.zeros(1, length, dtype=torch.int64)
        mask = SampleMask(layout, first, FirstKeys(), lambda: None, in_blocks=False)
    found: dict[str, int] = {}
    mesh.traffic.listener = lambda kind, ranks, size: found.update({kind: found.get(kind, 0) + size})
    context_of_layer = LayerContext(None, None, {None: mask}, RandomKey(0, (0,)), layout, layout.runs)
    layer(torch.randn(length // 2, 1, sizes.hidden), context_of_layer)
    return found


def test_what_travels_is_as_wide_as_the_latents() -> None:
    sizes = LatentSizes(hidden=32, heads=4, query_rank=6, rank=8, key_width=4, rotated=2, value_width=3, scale=1.0)
    gathered = 16 * (6 + 8 + 2) * 4
    assert sent("tp", sizes) == {"all-gather": gathered, "reduce-scatter": 16 * 32 * 4}
    (passed_on,) = sent("cp", sizes).values()
    assert passed_on == 8 * (8 + 2) * 4
    (passed_on,) = sent("cp", replace(sizes, rank=60)).values()
    assert passed_on == 2 * 8 * 4 * 6 * 4  # keys and values of the heads, as wide as the wider ones, are fewer


@pytest.mark.parametrize("latents", SIZES)
@pytest.mark.parametrize("gate", [False, True])
def test_weights_are_counted(latents: str, gate: bool) -> None:
    network = made(latents, output_gate=gate)
    elements = 0
    for parameter, piece in named_pieces(network.stage):
        if ".latent_attention." in piece.tensor.name and "norm" not in piece.tensor.name:
            elements += piece.view(parameter).numel()
    config = network.stage.config
    assert KINDS["latent_attention"].weights(config) * config.num_layers == elements
    seen = KINDS["latent_attention"].products(config, 10.0) - KINDS["latent_attention"].weights(config)
    widths = config.qk_head_dim + config.qk_pos_emb_head_dim + config.v_head_dim
    assert seen == config.num_attention_heads * widths * 10
