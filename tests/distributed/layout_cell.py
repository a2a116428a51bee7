"""Cell of the layout matrix: the model and its training, the layout, and the samples."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite.config.adapters import AdaptersConfig
from megalite.config.model import ModelConfig
from megalite.config.offload import OffloadConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.config.pipeline_layout import StageLayers
from megalite.model.recompute import Recompute
from megalite.optim.learning_rate import Rates
from megalite.parallel.rounded_products import Rounding, Roundings
from megalite.pipeline.stages import Stages
from megalite_kernels.recipes import recipe
from tests.adapters_oracle import Adapters
from tests.experts_oracle import SEPARATE_SCORES, Experts
from tests.harness.covering_array import Row
from tests.initial_weights import Network
from tests.mixers_oracle import Mixers
from tests.oracle import Dropout, Oracle
from tests.prediction_oracle import Depths
from tests.prediction_weights import NetworkWithDepths
from tests.sparse_oracle import Indexing

SEQUENCE = 12
LONG_SEQUENCE = 24  # can be cut for 2, 3 and 4 context-parallel ranks
LAYERS = 4
HIDDEN = 16
DEPTHS_FACTOR = 0.6
CLIP_ALPHA = 0.3

KEY_VALUES = {"mha": (4, 4), "gqa": (8, 4), "few": (8, 2), "mqa": (4, 1), "uneven6": (6, 3), "uneven12": (12, 3)}
"""(heads, key-value groups): one group per head; several groups a rank; fewer groups than 4 ranks; one group; groups
whose heads lie on two ranks."""
MAMBA = {"grouped": (8, 4, 3, 5, 4), "wide": (4, 4, 6, 3, 2), "plain": (2, 1, 4, 6, 4), "shared": (8, 1, 3, 4, 3)}
"""Sizes of Mamba-2: (heads, groups, width, width of the state, tokens that the convolution sees)."""
DELTA = {"grouped": (4, 8, 3, 5, 4), "wide": (4, 4, 6, 2, 2), "plain": (1, 2, 4, 4, 4), "shared": (2, 8, 3, 4, 3)}
"""Sizes of the gated delta net: (heads of keys, of values, width of each, tokens of the convolution)."""
KIMI = {"grouped": (8, 3, 4, None), "wide": (4, 6, 2, -5.0), "plain": (1, 4, 4, None), "shared": (4, 2, 4, -1.0)}
"""Sizes of Kimi delta attention: (heads, width, tokens of the convolution, lower bound of the decay)."""
LATENTS: dict[str, tuple[int | None, int, int, int, int]] = {
    "narrow values": (6, 8, 4, 2, 3),
    "wide values": (None, 5, 2, 4, 9),
    "equal": (4, 6, 3, 2, 5),
    "few": (3, 2, 4, 4, 6),
    "blocks": (32, 32, 8, 8, 16),
}
"""Sizes of latent attention: (rank of queries and of the rest, width of keys, of what is rotated, of values)."""
INDEXING = {
    "few": Indexing(3, 6, 5),
    "few, heavy": Indexing(3, 6, 5, coefficient=7.0),
    "sparse loss": Indexing(2, 4, 4, sparse_loss=True, interleaved=True),
    "without relu": Indexing(1, 5, 3, relu=False),
    "more than is seen": Indexing(4, 4, 50),
    "without loss": Indexing(4, 4, 6, coefficient=None),
    "warmup": Indexing(3, 6, 5, stage="warmup"),
    "indexer": Indexing(2, 4, 6, stage="indexer", sparse_loss=True),
    "every second": Indexing(3, 4, 5, every=2),
    "from the second on": Indexing(3, 4, 5, every=3, offset=2, sparse_loss=True),
}
"""Options of sparse attention; rotated are at most 4 channels."""
ADAPTERS = {
    "lora": AdaptersConfig(lora_rank=3, lora_alpha=6.0),
    "some": AdaptersConfig(lora_rank=2, lora_alpha=3.0, lora_target_modules=("q_proj", "value", "layers.[13].mlp.up")),
    "rslora": AdaptersConfig(lora_rank=4, lora_alpha=1.0, use_rslora=True),
    "dora": AdaptersConfig(lora_rank=2, use_dora=True),
    "dropout": AdaptersConfig(lora_rank=3, lora_alpha=6.0, lora_dropout=0.4),
    "tables": AdaptersConfig(lora_rank=3, lora_target_modules=("query", "lm_head", "embed_tokens")),
    "head, dora": AdaptersConfig(lora_rank=2, lora_target_modules=("down", "output_layer"), use_dora=True),
    "tables, dora": AdaptersConfig(lora_rank=2, lora_target_modules=("down", "lm_head", "embed_tokens"), use_dora=True),
}
ADAPTERS_OF_ORACLE = {
    "lora": Adapters(3, 2.0),
    "some": Adapters(2, 1.5, ("query", "value", "layers.1.mlp.up", "layers.3.mlp.up")),
    "rslora": Adapters(4, 0.5),
    "dora": Adapters(2, 1.0, dora=True),
    "tables": Adapters(3, 1.0, ("query", "output_layer", "embedding.word_embeddings")),
    "head, dora": Adapters(2, 1.0, ("down", "output_layer"), dora=True),
    "tables, dora": Adapters(2, 1.0, ("down", "output_layer", "embedding.word_embeddings"), dora=True),
}
CONVOLUTION = {"grouped": (3, False), "wide": (5, True), "plain": (1, True), "shared": (2, False)}
"""Options of the short convolution: (tokens that it sees, biases)."""
VOCABULARIES = {"even": (32, 8), "odd": (29, 4), "empty": (15, 16)}
"""(tokens, make_vocab_size_divisible_by): no padding; some; padding only on all ranks but the first."""
FAMILIES = ("gpt2", "llama", "neox", "gemma", "gemma3")
EXPERTS: dict[str, Experts] = {
    "mixtral": Experts(topk=2, losses={"aux_loss": 0.5}, z_loss=0.1),
    "deepseek": Experts(
        topk=4,
        score="sigmoid",
        scaling=2.5,
        groups=(4, 3, 2),
        losses={"seq_aux_loss": 0.5, "global_aux_loss": 0.3},
        bias_rate=0.05,
    ),
    "switch": Experts(topk=1, score="pre_softmax", capacity_factor=0.8, losses={"seq_aux_loss": 0.7}, z_loss=0.2),
    "s-base": Experts(topk=1, score="sigmoid", evened_samples=1, z_loss=0.1),
    "nemotron": Experts(topk=3, score="sqrtsoftplus", scaling=1.5, losses={"seq_aux_loss": 0.4}, bias_rate=0.05),
    "kimi": Experts(topk=3, score="sigmoid", quantile_ema=0.25),
}
"""Families with experts; switch is made of gpt2, with biases and a limited capacity, the others of llama."""
LATENT = {"nemotron": 6}
LLAMAS = ("llama", "mixtral", "deepseek", "s-base", "nemotron", "kimi")
EXPERTS_OF = EXPERTS | {"gpt-oss": Experts(topk=3, losses={"seq_aux_loss": 0.5})}
EXPERT_LAYERS = {
    "mixtral": (0, 1, 2, 3),
    "deepseek": (1, 2, 3),
    "switch": (0, 2),
    "s-base": (1, 3),
    "gpt-oss": (0, 1, 2, 3),
    "nemotron": (0, 2, 3),
    "kimi": (0, 1, 3),
}
NUM_EXPERTS = {"mixtral": 4, "deepseek": 8, "switch": 4, "s-base": 4, "gpt-oss": 4, "nemotron": 8, "kimi": 8}
EXPERT_FFN = {"mixtral": None, "deepseek": 12, "switch": 20, "s-base": 8, "gpt-oss": 12, "nemotron": 12, "kimi": 8}
SHARED_FFN = {"mixtral": 0, "deepseek": 16, "switch": 12, "s-base": 0, "gpt-oss": 0, "nemotron": 16, "kimi": 0}
RECOMPUTE = {
    "none": Recompute(),
    "selective": Recompute(attention=True),
    "uniform": Recompute(method="uniform", layers=3),
    "block": Recompute(method="block", layers=2),
    "experts": Recompute(attention=True, moe=True),
}
LAYOUT_FACTORS: dict[str, tuple[Any, ...]] = {
    "tp": (1, 2, 4),
    "sequence_parallel": (False, True),
    "pp": (1, 2, 3, 4),
    "schedule": ("1f1b", "gpipe", "zb-h1", "interleaved-2", "interleaved-3", "zb-v"),
    "dp": (1, 2, 3, 4, 8),
    "cp": (1, 2, 3, 4),
    "way": ("p2p", "all_gather", "a2a", "a2a+p2p"),
    "chunks": (None, 2),
    "ep": (1, 2),
    "etp": (1, 2),
    "zero": (0, 1, 2, 3),
    "instances": (1, 2),
    "overlap": ("none", "reduce", "reduce and gather"),
    "recompute": ("none", "selective", "uniform", "block"),
    "mlp_parts": (1, 3),
    "micro_batch_size": (1, 2),
    "fused_loss": (False, True),
}
"""Factors that must not change the training."""
MODEL_FACTORS: dict[str, tuple[Any, ...]] = {
    "family": FAMILIES[:2],
    "key_values": tuple(KEY_VALUES),
    "qk_layernorm": (False, True),
    "tied": (True, False),
    "vocabulary": tuple(VOCABULARIES),
    "documents": (False, True),
    "loss_mask": ("ones", "random"),
    "loss_terms": (False, True),
}


class Split(NamedTuple):
    """Sizes of a mesh; the remaining ranks are data-parallel."""

    tensor_parallel_size: int
    context_parallel_size: int
    pipeline_parallel_size: int
    expert_parallel_size: int
    expert_tensor_parallel_size: int


@dataclass(frozen=True)
class Cell:
    """Run of the matrix; the fields are its factors."""

    # the model
    family: str = "gpt2"
    key_values: str = "mha"
    qk_layernorm: bool = False
    norm_over_heads: bool = False  # of queries and keys, for qk_layernorm
    output_gate: bool = False  # of attention
    no_rope_freq: str | None = None  # layers without rotary positions
    output_norm_freq: str | None = None  # layers with norms behind their halves
    latents: str | None = None  # attention over latents of these sizes
    indexing: str | None = None  # sparse attention with an indexer of these options
    yarn: bool = False  # with factors of the scores
    without_positions: bool = False  # for latents: neither a table nor a rotation
    softmax_type: str = "vanilla"
    tied: bool = True
    vocabulary: str = "even"
    parallel_residual: bool = False  # also in families that do not have it
    pattern: str | None = None  # of layers, each one half of a block, with | between stages; None: of LAYERS blocks
    recurrent: str = "grouped"  # sizes of recurrent layers
    depths: int = 0  # of multi-token prediction
    depth_letters: str | None = None  # of each of them; None: a layer as the last one
    repeated: bool = False  # one set of weights for all depths
    detached: bool = False  # their losses train the depths alone
    adapters: str | None = None  # which alone are trained
    recipe: str | None = None  # of products with rounded operands
    hybrid: bool = False  # gradients in e5m2
    rounds_weight_gradients: bool = False
    stores_activations: bool = False
    gathers_codes: bool = False
    plain_layers: tuple[int, ...] = ()  # whose operands are not rounded
    wide: int = 1  # factor of all widths, so that ranks have whole blocks
    # the layout
    tp: int = 1
    sequence_parallel: bool = False
    pp: int = 1
    standalone: bool = False  # depths on a stage without layers
    schedule: str = "1f1b"  # with interleaved-1f1b, followed by the number of stages per rank
    dp: int = 1
    cp: int = 1
    way: str = "p2p"  # of attention over the context-parallel ranks
    chains: bool = False  # recurrent layers pass states on
    chunks: int | None = None  # of a sample per context-parallel rank, dealt by the work of documents
    ep: int = 1
    etp: int = 1
    zero: int = 0
    instances: int = 1
    overlap: str = "none"
    recompute: str = "none"
    mlp_parts: int = 1  # of the sequence, in dense feed-forward layers
    micro_batch_size: int = 1
    shares: tuple[int, ...] | None = None  # micro-batches of each data-parallel rank; None: all have as many
    fused_loss: bool = False  # fused with the output layer
    # the data
    samples: int = 4  # per step, over all ranks
    sequence: int = SEQUENCE
    documents: bool = False
    loss_mask: str = "ones"  # random: also masks complete samples; nothing: no token counts; only N: one
    padding: bool = False  # at the end of some samples, and one of them consists of it
    # the training
    dispatcher: str = "alltoall"
    drop_policy: str = "probs"
    padded_experts: bool = False  # to the capacity
    shared_overlap: bool = False  # of the shared experts with the exchange
    loss_terms: bool = False  # label smoothing and z-loss
    optimizer: str = "sgd"
    per_head: bool = False  # matrices of Muon
    fused_qkv: bool = False  # one matrix of queries, gates, keys and values
    steps: int = 1
    first_step: int = 0
    clip_grad: float = 0.0
    dropout: float = 0.0  # hidden and attention
    attention_dropout: float | None = None  # if it differs from hidden dropout
    dtype: str = "float64"
    gradient_dtype: str | None = None  # if it is not dtype (fp32 for narrower dtypes)
    narrow: bool = False  # moments in bf16, masters in fp16
    compiled: str | None = None  # backend of torch.compile for the layers
    qk_clip: float | None = None  # threshold of the largest logit of a head
    logs_logits: bool = False  # without a clip
    ema_decay: float | None = None
    eight_bits: bool = False  # moments in fp8, masters as remainders
    on_host: float = 0.0  # share of the elements whose optimizer state is there
    arrive_late: bool = False  # gradients and weights travel during backward and forward
    slices_on_host: bool = False
    late_copies: bool = False  # each at the last moment
    offload: OffloadConfig | None = None  # of activations
    infinity_on: int | None = None  # rank on which step 0 has an infinite gradient

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def split(self) -> Split:
        return Split(self.tp, self.cp, self.pp, self.ep, self.etp)

    @property
    def stages(self) -> Stages:
        """Return the placement of the stages on the pipeline's ranks."""
        chunks = {"interleaved-2": 2, "interleaved-3": 3, "zb-v": 2}.get(self.schedule, 1)
        return Stages(self.pp, chunks, v_shaped=self.schedule == "zb-v")

    @property
    def schedule_name(self) -> str:
        return "interleaved-1f1b" if self.schedule.startswith("interleaved") else self.schedule

    def parts(self) -> list[StageLayers]:
        """Return the layers of each stage, distributed as evenly as possible; with many stages some have none."""
        count = self.stages.count
        if self.pattern is not None and "|" in self.pattern:
            borders = [0, *itertools.accumulate(map(len, self.pattern.split("|")))]
            assert len(borders) == count + 1, f"{self}: other stages than the schedule has"
        else:
            shared = count - self.standalone
            borders = [stage * layers(self) // shared for stage in range(shared + 1)] + [layers(self)] * self.standalone
        return [
            StageLayers(first, stop - first, embedding=stage == 0, loss=stage == count - 1)
            for stage, (first, stop) in enumerate(itertools.pairwise(borders))
        ]

    @property
    def step_numbers(self) -> range:
        return range(self.first_step, self.first_step + self.steps)

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def torch_gradient_dtype(self) -> torch.dtype:
        if self.gradient_dtype is None:
            return torch.promote_types(self.torch_dtype, torch.float32)
        dtype: torch.dtype = getattr(torch, self.gradient_dtype)
        return dtype

    def alone(self) -> Cell:
        """Return the same training on one process, with the plainest options: the same for all cells that must
        agree."""
        plain: dict[str, Any] = {name: getattr(Cell, name) for name in LAYOUT_FACTORS}
        pattern = self.pattern and self.pattern.replace("|", "")
        return replace(
            self, **plain, pattern=pattern, standalone=False, shares=None, compiled=None, infinity_on=None
        ).on_device()

    def on_device(self) -> Cell:
        """Return the same run without offloading."""
        return replace(self, offload=None, on_host=0.0, arrive_late=False, slices_on_host=False, late_copies=False)

    def __str__(self) -> str:
        """Return the factors that are not the plainest."""
        changed = {name: value for name, value in vars(self).items() if value != getattr(Cell, name)}
        return ", ".join(f"{name}={value}" for name, value in changed.items())


def layers(cell: Cell) -> int:
    """Return the number of layers."""
    return LAYERS if cell.pattern is None else len(cell.pattern.replace("|", ""))


def expert_layers(cell: Cell) -> tuple[int, ...]:
    """Return the numbers of the layers with experts; in a pattern, among its feed-forward layers."""
    if cell.pattern is None:
        return EXPERT_LAYERS.get(cell.family, ())
    return tuple(number for number, letter in enumerate(re.sub(r"[^-E]", "", cell.pattern)) if letter == "E")


def valid(row: Mapping[str, Any]) -> bool:
    """Tell whether a row of the matrix's factors, perhaps incomplete, can be run, with at most 8 ranks.

    Only rows that `validate` refuses are invalid.
    """
    ranks = row["tp"] * row["cp"] * row["pp"] * row["dp"]
    if ranks > 8 or not _valid_context(row):
        return False
    expert_copies, rest = divmod(ranks, row["pp"] * row["ep"] * row["etp"])
    if rest:
        return False
    if row["schedule"].startswith("interleaved") and row["pp"] == 1:
        return False
    if row["sequence_parallel"] and row["tp"] == 1:
        return False
    if row["overlap"] == "reduce and gather" and row["zero"] == 0:
        return False
    if row["instances"] > 1 and (row["zero"] == 0 or row["dp"] % row["instances"] or expert_copies % row["instances"]):
        return False
    if KEY_VALUES[row["key_values"]][0] % row["tp"]:
        return False
    return samples(row["dp"]) % (row["dp"] * row["micro_batch_size"]) == 0


def _valid_context(row: Mapping[str, Any]) -> bool:
    """Tell whether the row's context parallelism can be run, and is not the same as that of a plainer row."""
    cp, tensor = row["cp"], row["tp"] if row["sequence_parallel"] else 1
    if cp == 1:
        return row["way"] == "p2p" and row["chunks"] is None
    heads = KEY_VALUES[row["key_values"]][0] // row["tp"]
    if row["way"] == "a2a+p2p" and cp != 4:
        return False
    chunks = (row["chunks"] or 2) * cp * tensor
    return LONG_SEQUENCE % chunks == 0 and heads % head_ranks(row) == 0


def head_ranks(row: Mapping[str, Any]) -> int:
    """Return how many context-parallel ranks exchange heads."""
    return {"a2a": row["cp"], "a2a+p2p": 2}.get(row["way"], 1)


def samples(dp: int) -> int:
    """Return the samples per step: 4, or a number that `dp` ranks can share."""
    return {3: 6, 8: 8}.get(dp, 4)


def make_cell(row: Row, **rest: Any) -> Cell:
    """Return the cell of a row. Samples are longer if context parallelism is among its factors, whatever its value."""
    sequence = LONG_SEQUENCE if "cp" in row else SEQUENCE
    return Cell(**{"samples": samples(row["dp"]), "sequence": sequence} | row | rest)


def model_config(cell: Cell) -> ModelConfig:
    latents = {} if cell.latents is None else latent_options(cell)
    return replace(_plain_model(cell), **latents) if latents else _plain_model(cell)


def latent_options(cell: Cell) -> dict[str, Any]:
    """Return the options of a network with latent attention that others do not have."""
    query_rank, rank, keys, rotated, values = LATENTS[cell.latents or ""]
    yarn = {"position_embedding_type": "yarn", "rotary_scaling_factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.4}
    return {
        "multi_latent_attention": cell.pattern is None,
        **indexing_options(cell),
        "q_lora_rank": query_rank,
        "kv_lora_rank": rank,
        "qk_head_dim": keys,
        "qk_pos_emb_head_dim": rotated,
        "v_head_dim": values,
        "latent_norm_epsilon": 1e-3 if cell.qk_layernorm else None,
        "kv_channels": None,
        "group_query_attention": False,
        "num_query_groups": 1,
        **(yarn | {"yarn_original_max_position_embeddings": 64} if cell.yarn else {}),
        **({"position_embedding_type": "none"} if cell.without_positions else {}),
    }


def indexing_options(cell: Cell) -> dict[str, Any]:
    """Return the options of sparse attention; none in networks without it."""
    if cell.indexing is None:
        return {}
    indexing = INDEXING[cell.indexing]
    return {
        "experimental_attention_variant": "dsa" if cell.pattern is None else None,
        "dsa_indexer_n_heads": indexing.heads,
        "dsa_indexer_head_dim": indexing.width,
        "dsa_indexer_topk": indexing.topk,
        "dsa_indexer_loss_coeff": indexing.coefficient,
        "dsa_indexer_use_sparse_loss": indexing.sparse_loss,
        "dsa_stage": indexing.stage,
        "dsa_indexer_rope_interleaved": indexing.interleaved,
        "dsa_indexer_scoring_relu": indexing.relu,
        "dsa_indexer_k_norm_epsilon": indexing.epsilon,
        "dsa_indexer_topk_freq": indexing.every,
        "dsa_indexer_skip_topk_offset": indexing.offset,
    }


def ffn(cell: Cell) -> int:
    """Return the inner width of dense feed-forward layers."""
    return 24 if cell.wide == 1 else 32 * cell.wide


def roundings(cell: Cell) -> Roundings:
    """Return how the layers of the cell round operands."""
    if cell.recipe is None:
        return Roundings()
    chosen = recipe(cell.recipe, "hybrid" if cell.hybrid else "e4m3")
    each = Rounding(chosen, cell.rounds_weight_gradients, cell.gathers_codes, cell.stores_activations)
    of_layers = tuple(None if layer in cell.plain_layers else each for layer in range(layers(cell)))
    return Roundings(of_layers, None if cell.recipe == "nvfp4" else each)


def sparse_layers(cell: Cell) -> dict[int, int]:
    """Return the numbers, among layers of latent attention, of those with sparse attention, with their places."""
    if cell.indexing is None:
        return {}
    letters = "D" * LAYERS if cell.pattern is None else cell.pattern.replace("|", "")
    return {sum(map(letters[:place].count, "+D")): place for place, letter in enumerate(letters) if letter == "D"}


def _plain_model(cell: Cell) -> ModelConfig:
    heads, groups = KEY_VALUES[cell.key_values]
    vocabulary, divisor = VOCABULARIES[cell.vocabulary]
    gemma2, gemma3 = cell.family == "gemma", cell.family == "gemma3"
    gemma, neox, rotary = gemma2 or gemma3, cell.family == "neox", cell.family not in ("gpt2", "switch")
    llama, oss = cell.family in LLAMAS or gemma, cell.family == "gpt-oss"
    return ModelConfig(
        **expert_options(cell),
        num_layers=layers(cell),
        **recurrent_options(cell),
        hybrid_layer_pattern=cell.pattern and cell.pattern.replace("|", ""),
        hidden_size=HIDDEN * cell.wide,
        num_attention_heads=heads,
        kv_channels=4 * cell.wide,
        ffn_hidden_size=ffn(cell),
        group_query_attention=groups < heads,
        num_query_groups=groups if groups < heads else 1,
        max_position_embeddings=cell.sequence + 1,
        position_embedding_type="yarn" if gemma2 or oss else "rope" if rotary else "learned_absolute",
        rotary_percent=0.5 if neox else 1.0,
        rotary_scaling_factor=4.0 if gemma2 or oss else 1.0,
        yarn_original_max_position_embeddings=64 if gemma2 or oss else None,
        rotary_base=1e5 if gemma3 else 1e4,
        window_rotary_base=1e3 if gemma3 else None,
        rotary_seq_len_interpolation_factor=8.0 if gemma3 else None,
        use_parallel_residual=neox or cell.parallel_residual,
        exact_gelu=neox,
        window_size="3,0" if gemma or oss else None,
        window_attn_skip_freq="2" if gemma or oss else None,
        sandwich_norm=gemma,
        scale_embeddings=gemma,
        apply_layernorm_1p=gemma,
        query_pre_attn_scalar=7.0 if gemma2 else None,
        attn_logit_softcapping=2.0 if gemma2 else None,
        final_logit_softcapping=3.0 if gemma2 else None,
        normalization="RMSNorm" if llama or oss else "LayerNorm",
        qk_layernorm=cell.qk_layernorm or gemma3,
        qk_layernorm_over_heads=cell.norm_over_heads,
        attention_output_gate=cell.output_gate,
        no_rope_freq=cell.no_rope_freq,
        output_norm_freq=cell.output_norm_freq,
        softmax_type="learnable" if oss else cell.softmax_type,  # type: ignore[arg-type]
        swiglu=llama and not gemma,
        geglu=gemma,
        quick_geglu=oss,
        glu_linear_offset=1.0 if oss else 0.0,
        activation_func_clamp_value=0.5 if oss else None,
        add_bias_linear=not llama,
        untie_embeddings_and_output_weights=not cell.tied,
        vocab_size=vocabulary,
        make_vocab_size_divisible_by=divisor,
        init_method_std=0.2,
        mtp_num_layers=cell.depths or None,
        mtp_hybrid_override_pattern=cell.depth_letters,
        mtp_loss_scaling_factor=DEPTHS_FACTOR if cell.depths else ModelConfig.mtp_loss_scaling_factor,
        mtp_use_repeated_layer=cell.repeated,
        mtp_detach_heads=cell.detached,
        qk_clip=cell.qk_clip is not None,
        qk_clip_alpha=CLIP_ALPHA,
        qk_clip_threshold=cell.qk_clip or 100.0,
        log_max_attention_logit=cell.logs_logits,
        hidden_dropout=cell.dropout,
        attention_dropout=cell.dropout if cell.attention_dropout is None else cell.attention_dropout,
    )


def recurrent_options(cell: Cell) -> dict[str, Any]:
    """Return the options of recurrent layers; none in networks without them. Chunks are shorter than samples."""
    options: dict[str, Any] = {}
    letters = (cell.pattern or "") + (cell.depth_letters or "")
    if "M" in letters:
        names = ("num_heads", "num_groups", "head_dim", "state_dim", "conv_kernel_dim")
        options |= {f"mamba_{name}": size for name, size in zip(names, MAMBA[cell.recurrent], strict=True)}
        options["mamba_chunk_size"] = 5
    if "G" in letters:
        names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
        options |= {f"linear_{name}": size for name, size in zip(names, DELTA[cell.recurrent], strict=True)}
        options |= {"linear_chunk_size": 4, "linear_allow_neg_eigval": cell.recurrent == "wide"}
    if "K" in letters:
        names = ("num_heads", "head_dim", "conv_kernel_dim", "lower_bound")
        options |= {f"kda_{name}": size for name, size in zip(names, KIMI[cell.recurrent], strict=True)}
        options["kda_chunk_size"] = 4
    if "L" in letters:
        options["short_conv_kernel_dim"], options["short_conv_bias"] = CONVOLUTION[cell.recurrent]
    return options


def expert_options(cell: Cell) -> dict[str, Any]:
    """Return the options of the layers with experts; none for other families."""
    if cell.family not in EXPERTS_OF:
        return {}
    experts, having = EXPERTS_OF[cell.family], EXPERT_LAYERS[cell.family]
    groups, chosen, scores = experts.groups or (None, None, None)
    losses = experts.losses if experts.evened_samples is None else {"sinkhorn": 0.0}
    losses = losses if experts.quantile_ema is None else {"quantile_balancing": 0.0}
    return {
        "num_experts": NUM_EXPERTS[cell.family],
        "moe_layer_freq": None if cell.pattern else str([int(layer in having) for layer in range(LAYERS)]),
        "moe_ffn_hidden_size": EXPERT_FFN[cell.family],
        "moe_router_topk": experts.topk,
        "moe_router_score_function": experts.score if experts.score in SEPARATE_SCORES else "softmax",
        "moe_router_bias": cell.family == "gpt-oss",
        "moe_router_pre_softmax": experts.score == "pre_softmax",
        "moe_router_num_groups": groups,
        "moe_router_group_topk": chosen,
        "moe_router_group_scores": scores,
        "moe_router_topk_scaling_factor": experts.scaling,
        "moe_router_enable_expert_bias": experts.bias_rate > 0,
        "moe_router_bias_update_rate": experts.bias_rate,
        "moe_router_quantile_balancing_ema": experts.quantile_ema or 0.0,
        "moe_router_load_balancing_type": tuple(losses),
        "moe_aux_loss_coeff": tuple(losses.values()),
        "moe_z_loss_coeff": experts.z_loss or None,
        "moe_expert_capacity_factor": experts.capacity_factor,
        "moe_token_drop_policy": cell.drop_policy,
        "moe_pad_expert_input_to_capacity": cell.padded_experts,
        "moe_shared_expert_intermediate_size": SHARED_FFN[cell.family] * cell.wide or None,
        "moe_latent_size": LATENT.get(cell.family),
        "moe_shared_expert_gate": cell.family == "switch",
        "moe_shared_expert_overlap": cell.shared_overlap and SHARED_FFN[cell.family] > 0,
        "moe_token_dispatcher_type": cell.dispatcher,
    }


def network(cell: Cell) -> Network:
    """Return the same network as an argument for the drawing of initial weights."""
    heads, groups = KEY_VALUES[cell.key_values]
    gemma = cell.family in ("gemma", "gemma3")
    plain, oss = cell.family in LLAMAS or gemma, cell.family == "gpt-oss"
    family = cell.family
    return NetworkWithDepths(
        depths=min(cell.depths, 1) if cell.repeated else cell.depths,
        letters=cell.depth_letters,
        layers=layers(cell),
        pattern=cell.pattern and cell.pattern.replace("|", ""),
        hidden=HIDDEN * cell.wide,
        heads=heads,
        groups=groups,
        head_dim=4 * cell.wide,
        ffn=ffn(cell),
        vocabulary=VOCABULARIES[cell.vocabulary][0],
        std=0.2,
        positions=cell.sequence + 1 if cell.family in ("gpt2", "switch") else 0,
        centered=not plain and not oss,
        around_one=gemma,
        biases=not plain,
        gated=plain or oss,
        tied=cell.tied,
        sandwich=gemma,
        behind=tuple(json.loads(cell.output_norm_freq or "[]")),
        query_key_norm=cell.qk_layernorm or cell.family == "gemma3",
        norm_over_heads=cell.norm_over_heads,
        output_gate=cell.output_gate,
        sinks=oss or cell.softmax_type == "learnable",
        expert_layers=expert_layers(cell),
        experts=NUM_EXPERTS.get(family, 0),
        expert_ffn=EXPERT_FFN.get(family) or ffn(cell),
        shared_ffn=SHARED_FFN.get(family, 0) * cell.wide,
        shared_gate=family == "switch",
        latent=LATENT.get(family, 0),
        mamba=MAMBA[cell.recurrent],
        delta=DELTA[cell.recurrent],
        convolution=CONVOLUTION[cell.recurrent],
        kimi=KIMI[cell.recurrent],
        router_bias=oss,
        latents=None if cell.latents is None else LATENTS[cell.latents],
        indexers=None if cell.indexing is None else (INDEXING[cell.indexing].heads, INDEXING[cell.indexing].width),
        indexed=tuple(
            number for number, place in sparse_layers(cell).items() if INDEXING[cell.indexing or ""].has_indexer(place)
        ),
    )


def optimizer_config(cell: Cell) -> OptimizerConfig:
    # With a large epsilon, a gradient that is zero except for rounding (a key's bias) has almost no effect on the
    # update.
    return OptimizerConfig(
        lr=0.0,
        optimizer=cell.optimizer,  # type: ignore[arg-type]
        clip_grad=cell.clip_grad,
        adam_eps=1e-6,
        sgd_momentum=0.9,
        muon_nesterov=True,
        muon_split_qkv=not cell.fused_qkv,
        muon_split_qkv_per_head=cell.per_head,
        muon_extra_scale_factor=0.2,
        lars_coefficient=0.02,
        adafactor_eps=1e-12,
        ema_decay=cell.ema_decay,
        use_precision_aware_optimizer=cell.narrow or cell.eight_bits,
        main_params_dtype="fp16" if cell.narrow else "fp32",
        exp_avg_dtype="bf16" if cell.narrow else "fp8" if cell.eight_bits else "fp32",
        exp_avg_sq_dtype="bf16" if cell.narrow else "fp8" if cell.eight_bits else "fp32",
        store_param_remainders=cell.eight_bits,
    )


def loss_terms(cell: Cell) -> dict[str, float]:
    return {"label_smoothing": 0.1, "z_loss": 0.02} if cell.loss_terms else {}


def rates(cell: Cell, step: int) -> Rates:
    """Return rates that differ in every step, and for the token tables."""
    rate = {"sgd": 0.1, "lars": 1.0}.get(cell.optimizer, 0.02) * (1 + step % 3)
    return Rates(rate, rate / 2, weight_decay=0.1 / (1 + step % 2))


def oracle(cell: Cell) -> Oracle:
    if cell.softmax_type == "off-by-one":
        return replace(oracle(replace(cell, softmax_type="vanilla")), off_by_one=True)
    if cell.no_rope_freq is not None:
        plain = oracle(replace(cell, no_rope_freq=None))
        return replace(plain, unrotated=tuple(n for n, one in enumerate(json.loads(cell.no_rope_freq)) if one))
    if cell.latents is not None:
        found = replace(oracle(replace(cell, latents=None)), latent_epsilon=1e-3 if cell.qk_layernorm else None)
        yarn = {"position_embedding_type": "yarn", "yarn_factor": 4.0, "yarn_original": 64, "yarn_mscales": (0.7, 0.4)}
        found = replace(found, **yarn) if cell.yarn else found  # type: ignore[arg-type]
        if cell.indexing is not None:
            found = replace(found, indexing=INDEXING[cell.indexing], sparse=frozenset(sparse_layers(cell)))
        return replace(found, position_embedding_type="none") if cell.without_positions else found
    if cell.pattern is not None:
        mixers = Mixers(strength=2.0 if cell.recurrent == "wide" else 1.0, bound=KIMI[cell.recurrent][3])
        return replace(oracle(replace(cell, pattern=None)), pattern=cell.pattern.replace("|", ""), mixers=mixers)
    if cell.family == "gpt-oss":
        base = oracle(replace(cell, family="gemma"))
        scores = {"score_divisor": None, "score_cap": math.inf, "logit_cap": math.inf}
        of_glu = {"activation": "quick_geglu", "glu_offset": 1.0, "glu_limit": 0.5}
        others = {"norm_around_one": False, "embedding_scale": 1.0, "experts": EXPERTS_OF[cell.family]}
        return replace(base, **scores, **of_glu, **others)  # type: ignore[arg-type]
    if cell.family in EXPERTS:
        experts = replace(EXPERTS[cell.family], drop_policy=cell.drop_policy)
        base = replace(cell, family="gpt2" if cell.family == "switch" else "llama")
        return replace(oracle(base), experts=experts, parallel_residual=cell.parallel_residual)
    if cell.family == "gpt2":
        return Oracle()
    if cell.family == "neox":
        return Oracle(
            parallel_residual=True, activation="exact_gelu", position_embedding_type="rope", rotary_percent=0.5
        )
    llama = Oracle(normalization="RMSNorm", activation="swiglu", position_embedding_type="rope")
    if cell.family == "llama":
        return llama
    gemma = replace(
        llama,
        activation="geglu",
        windows=(4, None) * (LAYERS // 2),
        embedding_scale=math.sqrt(HIDDEN),
        norm_around_one=True,
    )
    if cell.family == "gemma3":
        return replace(gemma, rotary_base=1e5, window_rotary_base=1e3, interpolation=8.0)
    return replace(
        gemma,
        position_embedding_type="yarn",
        yarn_factor=4.0,
        yarn_original=64,
        score_divisor=math.sqrt(7.0),
        score_cap=2.0,
        logit_cap=3.0,
    )


def depths(cell: Cell) -> Depths:
    return Depths(cell.depths, cell.depth_letters, cell.repeated, cell.detached, DEPTHS_FACTOR)


def sample_numbers(cell: Cell, step: int) -> range:
    """Return the numbers of the step's samples in the run."""
    return range(step * cell.samples, (step + 1) * cell.samples)


def dropout(cell: Cell, step: int, seed: int) -> Dropout:
    """Return the oracle's dropout in a step."""
    config = model_config(cell)
    return Dropout(seed, sample_numbers(cell, step), config.hidden_dropout, config.attention_dropout)


@dataclass(frozen=True)
class Batch:
    """Samples of a step over all ranks, each field [samples, sequence]."""

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    document_ids: Tensor | None
    loss_mask: Tensor
    padding: Tensor | None


def batch(cell: Cell, step: int) -> Batch:
    """Return a batch that depends on the cell's data and model, not on its layout."""
    generator = torch.Generator().manual_seed(step)
    shape = (cell.samples, cell.sequence)
    text = torch.randint(VOCABULARIES[cell.vocabulary][0], (cell.samples, cell.sequence + 1), generator=generator)
    ends = torch.rand(shape, generator=generator) < 0.25
    keep = torch.rand(shape, generator=generator) < 0.6
    positions = torch.arange(cell.sequence).expand(shape)
    document_ids = None
    if cell.documents:
        document_ids = ends.long().cumsum(1) - ends.long()  # a document's last token belongs to it
        starts = torch.cat([torch.ones(cell.samples, 1, dtype=torch.bool), ends[:, :-1]], dim=1)
        positions = positions - (positions * starts).cummax(1).values
    masks = {"ones": torch.ones(shape), "nothing": torch.zeros(shape), "random": keep.double()}
    masks["random"][[0, 3]] = 0.0  # micro-batches without any token that counts
    if cell.loss_mask.startswith("only "):
        masks[cell.loss_mask] = torch.zeros(shape)
        masks[cell.loss_mask][1, int(cell.loss_mask.removeprefix("only "))] = 1.0
    mask = masks[cell.loss_mask].to(cell.torch_dtype)
    padding = None
    if cell.padding:
        ends_at = torch.randint(1, cell.sequence + 1, (cell.samples, 1), generator=generator)
        ends_at[1] = 0
        padding = torch.arange(cell.sequence) >= ends_at
        mask = mask * ~padding
    return Batch(text[:, :-1], text[:, 1:], positions, document_ids, mask, padding)
