"""Options of the network: sizes, positions, activations, norms, initialization."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from megalite.config.activations import FLAGS, Activation, activation_of
from megalite.config.fields import (
    CapacityFactor,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ShareAboveZero,
    ShareBelowOne,
    ShareInside,
    at_most,
)
from megalite.config.layer_patterns import (
    MOST_LAYERS,
    keys_before,
    layers_of_linear_attention,
    layers_with_experts,
    layers_with_output_norms,
    layers_without_rotation,
)
from megalite.config.layer_specs import (
    KINDS_WITH_LATENTS,
    PATTERN_FLAG,
    FeedForward,
    LayerSpec,
    Mixer,
    Names,
    kinds_without_attention,
    layer_names,
    numbers_in_names,
    pattern_of,
    specs_of_depth,
    specs_of_pattern,
    with_shared_choices,
)
from megalite.errors import ConfigurationError
from megalite.small_files import shown

MOST_EXPERTS = 2**20
"""Upper bound for the experts of a layer. Numbers up to 2^24 are exact in fp32, in which they travel between ranks."""

SoftmaxType = Literal["vanilla", "off-by-one", "learnable"]
LoadBalancing = Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "quantile_balancing", "none"]


@dataclass(frozen=True)
class ModelConfig:
    """Options of the network. Names and defaults are Megatron-LM's, but negative flags there are positive here."""

    num_layers: Annotated[PositiveInt, at_most(MOST_LAYERS)]
    """Transformer layers."""
    hidden_size: PositiveInt
    """Width of the residual stream."""
    num_attention_heads: Annotated[PositiveInt, at_most(1_000_000)]
    """Attention (query) heads."""
    ffn_hidden_size: PositiveInt | None = None
    """Width of the feed-forward layer; unset: 4 x hidden-size, or with a gate 8/3 of it, rounded down to a multiple of
    64."""
    kv_channels: PositiveInt | None = None
    """Width of one attention head; unset: hidden-size / num-attention-heads."""
    group_query_attention: bool = False
    """Share keys and values between groups of query heads; their number is num-query-groups."""
    num_query_groups: PositiveInt = 1
    """Groups of query heads that share keys and values (1: multi-query); needs group-query-attention."""
    max_position_embeddings: PositiveInt | None = None
    """Rows of the learned position table; needed by learned_absolute, at least seq-length."""
    position_embedding_type: Literal["learned_absolute", "rope", "yarn", "none"] = "learned_absolute"
    """Position embeddings: a learned table (of latent attention, rotary embeddings, too), rotary embeddings, rotary
    embeddings scaled by YaRN, or none."""
    rotary_base: PositiveFloat = 10000.0
    """Base of the rotary frequencies (theta)."""
    rotary_percent: ShareAboveZero = 1.0
    """Share of each head's channels that is rotated, above 0 up to 1."""
    rotary_interleaved: bool = False
    """Rotate channel 2i with 2i + 1, instead of channel i with i + half of the rotated channels."""
    rotary_seq_len_interpolation_factor: PositiveFloat | None = None
    """Divide the rotary angles by this, to extend the context by this factor (linear scaling); unset: 1."""
    use_rope_scaling: bool = False
    """Scale the rotary frequencies as Llama 3.1 does for long contexts."""
    rope_scaling_factor: PositiveFloat = 8.0
    """Factor of the Llama 3.1 scaling; needs use-rope-scaling, as the next three do."""
    rope_scaling_low_freq_factor: PositiveFloat = 1.0
    """Frequencies with fewer turns than this over the original context are divided by the full factor."""
    rope_scaling_high_freq_factor: PositiveFloat = 4.0
    """Frequencies with more turns than this over the original context are kept."""
    rope_scaling_original_max_position_embeddings: PositiveInt = 8192
    """Context length before the Llama 3.1 scaling."""
    rotary_scaling_factor: PositiveFloat = 1.0
    """Factor by which YaRN (arXiv:2309.00071) extends the original context; yarn needs one above 1."""
    yarn_original_max_position_embeddings: PositiveInt | None = None
    """Context length before YaRN; needed by yarn."""
    yarn_beta_fast: PositiveFloat = 32.0
    """Frequencies with more turns than this over YaRN's original context are kept."""
    yarn_beta_slow: PositiveFloat = 1.0
    """Frequencies with fewer turns than this over YaRN's original context are divided by the full factor."""
    yarn_correction_range_round_to_int: bool = True
    """Round the range of channels in which YaRN blends outwards to whole numbers."""
    mscale: NonNegativeFloat = 1.0
    """YaRN multiplies queries and keys by (0.1 x mscale x ln factor + 1) / (0.1 x mscale-all-dim x ln factor + 1)."""
    mscale_all_dim: NonNegativeFloat = 0.0
    """See mscale."""
    yarn_attention_factor: PositiveFloat | None = None
    """Factor of queries and keys under YaRN, instead of that of mscale and mscale-all-dim; unset: theirs."""
    window_size: str | None = None
    """LEFT,0: a token attends to this many keys before its own and none after it; unset: all before it."""
    window_attn_skip_freq: str | None = None
    """Layers without the window: N means every N-th; or a list of 1 (with) or 0 per layer, like ([1]*5+[0])*4; unset:
    none."""
    window_rotary_base: PositiveFloat | None = None
    """Base of the rotary frequencies, unscaled, in layers with the window (Gemma 3); unset: as in other layers."""
    scale_embeddings: bool = False
    """Multiply word embeddings by the root of hidden-size, rounded to the weights' precision (Gemma)."""
    query_pre_attn_scalar: PositiveFloat | None = None
    """Divide attention scores by the square root of this; unset: of the width of a head."""
    attn_logit_softcapping: PositiveFloat | None = None
    """Cap attention scores at this value c: a score s becomes c x tanh(s / c) (Gemma 2)."""
    final_logit_softcapping: PositiveFloat | None = None
    """Cap the output logits in the same way."""
    use_parallel_residual: bool = False
    """Run attention and the feed-forward layer on the same input, and add both outputs to it (GPT-J, GPT-NeoX)."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Kind of norm before attention, before the feed-forward layer and at the end."""
    norm_epsilon: NonNegativeFloat = 1e-5
    """Number added to the variance in each norm."""
    sandwich_norm: bool = False
    """Normalise also the outputs of attention and of the feed-forward layer before they are added (Gemma 2)."""
    output_norm_freq: str | None = None
    """Layers that normalise the outputs of attention and of the feed-forward layer instead of their inputs (OLMo 2): N
    means every N-th; or a list of 1 (outputs) or 0 per layer, like ([0]*3+[1])*8; unset: none."""
    apply_layernorm_1p: bool = False
    """Store the weight of each norm minus 1, so that it starts at 0."""
    qk_layernorm: bool = False
    """Normalise each head's queries and keys."""
    swiglu: bool = False
    """Feed-forward with a SiLU gate instead of GELU."""
    geglu: bool = False
    """Feed-forward with a GELU gate (Gemma) instead of GELU."""
    squared_relu: bool = False
    """Feed-forward with the square of ReLU instead of GELU."""
    exact_gelu: bool = False
    """GELU by the error function instead of its tanh form (as in Megatron-LM if it is not fused with a bias)."""
    add_bias_linear: bool = True
    """Biases in the linear layers. A flag that turns them off also makes GELU exact, as in Megatron-LM."""
    add_qkv_bias: bool = False
    """Biases on queries, keys and values only; for add-bias-linear off."""
    num_experts: Annotated[PositiveInt, at_most(MOST_EXPERTS)] | None = None
    """Experts of each layer that is a mixture of experts; unset: every layer is dense."""
    moe_layer_freq: str | None = None
    """Layers with experts: N means layers 0, N, 2N, ...; or a list of 1 (with) or 0 per layer, like ([0]*3+[1]*58);
    unset: all."""
    moe_ffn_hidden_size: PositiveInt | None = None
    """Width of each expert; unset: ffn-hidden-size."""
    moe_router_topk: PositiveInt = 2
    """Experts that each token chooses."""
    moe_router_score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    """Function from a token's logits to the scores of the experts."""
    moe_router_pre_softmax: bool = False
    """Softmax over all experts before the choice, without renormalization; off: over the chosen experts."""
    moe_router_num_groups: PositiveInt | None = None
    """Groups of consecutive experts, of which a token first chooses moe-router-group-topk; unset: one."""
    moe_router_group_topk: PositiveInt | None = None
    """Groups in which a token chooses its experts; needs moe-router-num-groups."""
    moe_router_group_scores: PositiveInt | None = None
    """Best scores whose sum is a group's score (DeepSeek-V3: 2); unset: moe-router-topk / moe-router-group-topk."""
    moe_router_topk_scaling_factor: PositiveFloat | None = None
    """Factor of the weights of the chosen experts; unset: 1."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = None
    """Precision of the router's logits; unset: that of the activations, and fp32 from the scores on."""
    moe_router_enable_expert_bias: bool = False
    """Add a bias to the scores for the choice, which rises for experts with too few tokens (arXiv:2408.15664)."""
    moe_router_bias_update_rate: NonNegativeFloat = 1e-3
    """Change of the bias per step."""
    moe_router_load_balancing_type: tuple[LoadBalancing, ...] = ("aux_loss",)
    """Balancing losses: per micro-batch (aux_loss), per sequence (seq_aux_loss), or with the loads of the previous step
    (global_aux_loss). Without a loss: sinkhorn, choices that are even within a micro-batch (arXiv:2202.01169);
    quantile_balancing, offsets of the logits by which samples of the previous steps would have chosen evenly."""
    moe_aux_loss_coeff: tuple[NonNegativeFloat, ...] = (0.0,)
    """Weight of each balancing loss, in the same order."""
    moe_z_loss_coeff: NonNegativeFloat | None = None
    """Weight of the mean squared log-sum-exp of the router's logits (arXiv:2202.08906); unset: none."""
    moe_expert_capacity_factor: CapacityFactor | None = None
    """Limit of a sequence's tokens per expert, as a multiple of their mean; unset: none is dropped."""
    moe_token_drop_policy: Literal["probs", "position"] = "probs"
    """Tokens that are dropped over the capacity: those with the least weights, or the last ones."""
    moe_pad_expert_input_to_capacity: bool = False
    """Pad the rows of each expert to its capacity for all sequences, so that the host never waits for their number."""
    moe_shared_expert_intermediate_size: PositiveInt | None = None
    """Total width of the shared experts, which process every token; unset: none."""
    moe_shared_expert_gate: bool = False
    """Multiply the shared experts' output with a sigmoid gate (Qwen2-MoE)."""
    moe_shared_expert_overlap: bool = False
    """Compute the shared experts while tokens are on their way to the routed ones."""
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = "allgather"
    """Send a token to all ranks of its experts' group, or only to those that have one of its experts (alltoall); flex:
    the latter by DeepEP if all ranks have it and a GPU, otherwise alltoall."""
    untie_embeddings_and_output_weights: bool = False
    """Use a separate weight for the output layer instead of the embedding's."""
    vocab_size: PositiveInt | None = None
    """Size of the vocabulary before padding; unset: the tokenizer's."""
    make_vocab_size_divisible_by: PositiveInt = 128
    """Pad the vocabulary to a multiple of this times the tensor-parallel size."""
    init_method_std: NonNegativeFloat = 0.02
    """Standard deviation of the initial weights; output layers of a block get it / sqrt(2 x num-layers); of a
    pattern's layers, / sqrt(num-layers)."""
    hidden_dropout: ShareBelowOne = 0.1
    """Dropout on the residual branches and after the embedding."""
    attention_dropout: ShareBelowOne = 0.1
    """Dropout on the attention probabilities."""
    hybrid_layer_pattern: str | None = None
    """Layers as letters, without num-layers: M Mamba-2, G gated delta net, K Kimi delta attention, L short convolution,
    * attention, + latent attention, D sparse attention, - dense feed-forward, E experts, each with its norm and its
    residual; | begins the next stage, as in pipeline-model-parallel-layout, and / a depth that predicts a further
    token, all depths with the same letters. Unset: every layer is attention and a feed-forward layer."""
    mamba_num_heads: PositiveInt | None = None
    """Heads of a Mamba-2 layer; unset: 2 x hidden-size / mamba-head-dim."""
    mamba_head_dim: PositiveInt = 64
    """Width of a head of a Mamba-2 layer."""
    mamba_state_dim: PositiveInt = 128
    """Width of the state of each channel of a Mamba-2 layer."""
    mamba_num_groups: PositiveInt = 8
    """Groups of heads of a Mamba-2 layer that share B, C and the statistics of the output's norm."""
    mamba_conv_kernel_dim: Annotated[PositiveInt, at_most(64)] = 4
    """Tokens that the convolution of a Mamba-2 layer sees."""
    mamba_dt_min: NonNegativeFloat = 0.0
    """Least step of a token in a Mamba-2 layer, after the softplus (Nemotron-H in transformers: 0.001)."""
    mamba_dt_max: PositiveFloat | None = None
    """Largest step of a token in a Mamba-2 layer; unset: none."""
    mamba_chunk_size: PositiveInt = 128
    """Tokens of a sample that a Mamba-2 layer computes by matrix products. It changes only rounding."""
    linear_num_key_heads: PositiveInt = 16
    """Heads of queries and keys of a gated delta net."""
    linear_num_value_heads: PositiveInt = 32
    """Heads of values of a gated delta net, a multiple of linear-num-key-heads."""
    linear_key_head_dim: PositiveInt = 128
    """Width of a head of queries and keys of a gated delta net."""
    linear_value_head_dim: PositiveInt = 128
    """Width of a head of values of a gated delta net."""
    linear_conv_kernel_dim: Annotated[PositiveInt, at_most(64)] = 4
    """Tokens that the convolution of a gated delta net sees."""
    linear_allow_neg_eigval: bool = False
    """Let a gated delta net turn what it has stored into its negative: twice the strength of a write (OLMo-Hybrid)."""
    linear_norm_epsilon: NonNegativeFloat | None = None
    """Number added to the variance in the norm of a gated delta net's output; unset: norm-epsilon."""
    linear_chunk_size: PositiveInt = 64
    """Tokens of a sample that a gated delta net computes by matrix products. It changes only rounding."""
    attention_output_gate: bool = False
    """Multiply the output of attention, before its output layer, with the sigmoid of a gate made of the layer's input
    (Qwen3-Next)."""
    no_rope_freq: str | None = None
    """Layers whose queries and keys are not rotated: N means every N-th; or a list of 1 (not rotated) or 0 per layer,
    like ([0]*3+[1])*6; unset: none."""
    moe_latent_size: PositiveInt | None = None
    """Width of tokens at the routed experts: a matrix before them narrows the tokens, and one after them widens their
    sum (Nemotron 3); unset: hidden-size."""
    moe_router_quantile_balancing_ema: ShareBelowOne = 0.0
    """Share of its old value that each step leaves of an offset of quantile_balancing."""
    short_conv_kernel_dim: Annotated[PositiveInt, at_most(64)] = 3
    """Tokens that a short convolution layer sees (LFM2)."""
    short_conv_bias: bool = False
    """Biases in a short convolution layer: of its projections and of the convolution."""
    kda_num_heads: PositiveInt = 32
    """Heads of a layer of Kimi delta attention."""
    kda_head_dim: PositiveInt = 128
    """Width of a head of Kimi delta attention, and of what decays and gates are made of."""
    kda_conv_kernel_dim: Annotated[PositiveInt, at_most(64)] = 4
    """Tokens that the convolution of Kimi delta attention sees."""
    kda_lower_bound: float | None = None
    """Least logarithm of the decay of a token in Kimi delta attention, which a sigmoid is multiplied with (Kimi K3,
    GLM-5.3: -5); unset: none, with a softplus."""
    kda_chunk_size: PositiveInt = 64
    """Tokens of a sample that Kimi delta attention computes by matrix products, a power of two. It changes only
    rounding."""
    softmax_type: SoftmaxType = "vanilla"
    """Softmax of attention over the keys (vanilla), and for each head one more logit without a value: 0 (off-by-one) or
    learned, a sink (learnable, gpt-oss)."""
    quick_geglu: bool = False
    """Feed-forward with the gate x * sigmoid(1.702 x) instead of GELU (gpt-oss)."""
    glu_linear_offset: NonNegativeFloat = 0.0
    """Number added to the up projection before it is multiplied with the gate."""
    activation_func_clamp_value: PositiveFloat | None = None
    """Clamp the input of the gate from above, and the up projection on both sides, at this value; unset: do not."""
    moe_router_bias: bool = False
    """Bias of the router's logits (gpt-oss); Megatron-LM has one where linear layers have biases."""
    qk_layernorm_over_heads: bool = False
    """Normalise queries, and keys, over all heads together instead of each (OLMoE, MiniMax-M2); for qk-layernorm."""

    multi_latent_attention: bool = False
    """Give all layers of a GPT attention over latents (DeepSeek-V2 and later), + in a pattern."""
    q_lora_rank: PositiveInt | None = None
    """Width of the latent from which the queries of latent attention are made; unset: they are made of the layer's
    input."""
    kv_lora_rank: PositiveInt = 32
    """Width of the latent from which the keys and values of latent attention are made."""
    qk_head_dim: PositiveInt = 128
    """Width of a head's queries and keys in latent attention without the rotated part."""
    qk_pos_emb_head_dim: PositiveInt = 64
    """Width of the rotated part of queries and keys in latent attention, of which all heads share the key."""
    v_head_dim: PositiveInt = 128
    """Width of a head's values in latent attention."""
    dsa_indexer_n_heads: PositiveInt | None = None
    """Heads of the indexer of sparse attention (DeepSeek-V3.2), which chooses the keys that a query attends to."""
    dsa_indexer_head_dim: PositiveInt | None = None
    """Width of a head of the indexer; its first qk-pos-emb-head-dim channels are rotated."""
    dsa_indexer_topk: PositiveInt | None = None
    """Keys that the indexer chooses for each query; of equal scores, the first keys."""
    dsa_indexer_topk_freq: PositiveInt = 1
    """Layers, counted with all kinds, of which one of sparse attention has an indexer; those between attend to what it
    has chosen."""
    dsa_indexer_skip_topk_offset: NonNegativeInt = 0
    """First layers, of all kinds, among which each one of sparse attention has an indexer."""
    dsa_indexer_loss_coeff: NonNegativeFloat | None = None
    """Weight of the indexer's loss, its divergence from attention's probabilities; 0 or unset: indexers are frozen."""
    dsa_indexer_use_sparse_loss: bool = False
    """Take the indexer's loss over the keys that it has chosen instead of all that a query sees."""
    dsa_stage: Literal["warmup", "sparse", "indexer"] = "sparse"
    """Stage of training with indexers. warmup: attention to all keys, and only indexers are trained; sparse: attention
    to the chosen keys, and all is trained, indexers by their own loss alone; indexer: as sparse, but only indexers."""
    dsa_indexer_rope_interleaved: bool = False
    """Rotate channel 2i of the indexer with 2i + 1 (GLM-5), instead of channel i with i + half of the rotated ones."""
    dsa_indexer_scoring_relu: bool = True
    """Pass the products of the indexer's queries and keys through a ReLU."""
    dsa_indexer_k_norm_epsilon: NonNegativeFloat | None = None
    """Number added to the variance in the norm of the indexer's keys; unset: norm-epsilon."""
    latent_norm_epsilon: NonNegativeFloat | None = None
    """Number added to the variance in the norms of latents (qk-layernorm); unset: norm-epsilon."""
    experimental_attention_variant: Literal["gated_delta_net", "dsa"] | None = None
    """gated_delta_net: mixer of a GPT's layers that have no attention, by linear-attention-freq. dsa: sparse attention
    in all layers of a GPT with latents, D in a pattern. Unset: neither."""
    linear_attention_freq: str | None = None
    """Layers whose mixer is experimental-attention-variant: N means all but every N-th; or a list of 1 (with) or 0 per
    layer, like ([1]*3+[0])*4."""
    apply_wd_to_qk_layernorm: bool = False
    """Let the norms of queries and keys decay, too (Qwen3-Next); of other norms no weight does."""
    embedding_multiplier: PositiveFloat = 1.0
    """Multiply word embeddings by this (Granite)."""
    residual_multiplier: PositiveFloat = 1.0
    """Multiply by this what each mixer and each feed-forward layer adds to the residual stream (Granite)."""
    logits_scaling: PositiveFloat = 1.0
    """Divide the output logits by this (Granite)."""
    mtp_num_layers: Annotated[NonNegativeInt, at_most(100)] | None = None
    """Depths of multi-token prediction (arXiv:2412.19437): each predicts one token more, by a layer as the last one, or
    by those behind / in hybrid-layer-pattern; 0 or unset: none."""
    mtp_hybrid_override_pattern: str | None = None
    """Letters of each depth, an earlier form of those behind / in hybrid-layer-pattern."""
    mtp_loss_scaling_factor: NonNegativeFloat = 0.1
    """Weight of the depths' losses together, each of which has an equal part."""
    mtp_use_repeated_layer: bool = False
    """Use one set of weights in all depths."""
    mtp_detach_heads: bool = False
    """Let the depths' losses train the depths alone: not the layers before them, the embedding and the output layer."""
    qk_clip: bool = False
    """After each update, scale the queries and keys of heads whose largest attention logit in the step is above
    qk-clip-threshold (QK-Clip, arXiv:2507.20534; MuonClip with --optimizer muon), and record max_attention_logit."""
    qk_clip_alpha: ShareInside = 0.5
    """Exponent of the queries' part of the scaling; keys have the rest."""
    qk_clip_threshold: PositiveFloat = 100.0
    """Attention logit to which qk-clip scales the largest one of a head."""
    log_max_attention_logit: bool = False
    """Record in every step the largest attention logit, which qk-clip does, too."""

    @property
    def measures_logits(self) -> bool:
        """True if training measures the largest logits of attention."""
        return self.has_attention and (self.qk_clip or self.log_max_attention_logit)

    @property
    def rotary(self) -> bool:
        """True if queries and keys are rotated by position, as those of latents are beside a table, too."""
        kind = self.position_embedding_type
        return kind in ("rope", "yarn") or (kind == "learned_absolute" and self.has_latents)

    @property
    def rotated_channels(self) -> int:
        """Number of channels of each head that rotary embeddings rotate."""
        return self.qk_pos_emb_head_dim if self.has_latents else int(self.head_dim * self.rotary_percent)

    @property
    def learned_positions(self) -> int | None:
        """Number of rows of the table of learned positions; None if the model has no such table."""
        return self.max_position_embeddings if self.position_embedding_type == "learned_absolute" else None

    @functools.cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """Descriptions of all layers. Raises ConfigurationError if a flag that describes them cannot be parsed."""
        windows = keys_before(self.window_size, self.window_attn_skip_freq, self.num_layers)
        rotary = [not unrotated for unrotated in layers_without_rotation(self.no_rope_freq, self.num_layers)]
        behind = layers_with_output_norms(self.output_norm_freq, self.num_layers)
        every, offset = self.dsa_indexer_topk_freq, self.dsa_indexer_skip_topk_offset
        if (pattern := self.hybrid_layer_pattern) is not None:
            return with_shared_choices(specs_of_pattern(pattern, windows, rotary, behind), every, offset)
        experts = layers_with_experts(self.num_experts, self.moe_layer_freq, self.num_layers)
        variant = self.experimental_attention_variant
        freq = self.linear_attention_freq if variant == "gated_delta_net" else None
        linear = layers_of_linear_attention(freq, self.num_layers)
        with_latents = "sparse_attention" if variant == "dsa" else "latent_attention"
        mixer = with_latents if self.multi_latent_attention else "attention"
        halves = (
            LayerSpec("gated_delta", "moe" if has_experts else "dense")
            if without_attention
            else LayerSpec(mixer, "moe" if has_experts else "dense", keys_before=before, rotary=rotated)
            for before, rotated, has_experts, without_attention in zip(windows, rotary, experts, linear, strict=True)
        )
        specs = [replace(spec, output_norm=each) for spec, each in zip(halves, behind, strict=True)]
        return with_shared_choices(specs, every, offset)

    @property
    def depths(self) -> int:
        """Number of depths of multi-token prediction."""
        return self.mtp_num_layers or 0

    @property
    def shares_embedding(self) -> bool:
        """True if the last stage has the weight of the first one's embedding, for the output layer or for depths."""
        return self.depths > 0 or not self.untie_embeddings_and_output_weights

    @property
    def own_depths(self) -> int:
        """Number of depths with weights of their own."""
        return min(self.depths, 1) if self.mtp_use_repeated_layer else self.depths

    @functools.cached_property
    def depth_layers(self) -> tuple[LayerSpec, ...]:
        """Descriptions of a depth's layers; none without depths. Raises ConfigurationError as `layers` does."""
        return specs_of_depth(self.layers, self.mtp_hybrid_override_pattern) if self.depths else ()

    @functools.cached_property
    def all_layers(self) -> tuple[LayerSpec, ...]:
        """Descriptions of all layers with weights of their own: of `layers`, then of the depths. Raises as `layers`."""
        return self.layers + self.depth_layers * self.own_depths

    @property
    def passed_layers(self) -> tuple[LayerSpec, ...]:
        """Descriptions of the layers that each token passes, those of a repeated depth several times."""
        return self.layers + self.depth_layers * self.depths

    @property
    def layers_flag(self) -> str:
        """Number of layers, with the flag that gives it, for messages."""
        if (pattern := self.hybrid_layer_pattern) is None:
            return f"--num-layers {self.num_layers}"
        return f"the {self.num_layers} layers of {PATTERN_FLAG} {shown(pattern)}"

    @functools.cached_property
    def kinds(self) -> frozenset[Mixer | FeedForward]:
        """Kinds of all layers; none if a flag that describes them cannot be parsed, which is reported elsewhere."""
        try:
            return frozenset(kind for layer in self.all_layers for kind in layer.kinds)
        except ConfigurationError:
            return frozenset()

    @functools.cached_property
    def has_attention(self) -> bool:
        """False if no layer reads the flags of attention; true if the layers are not known."""
        return not self.kinds or not self.kinds <= kinds_without_attention()

    @functools.cached_property
    def numbers(self) -> tuple[tuple[int | None, int | None], ...]:
        """Numbers of the mixer and the feed-forward layer of each of `all_layers`, by which their dropout is keyed.

        Those of `layers` are in the names of their weights; in a GPT, they are the layer's.
        """
        return numbers_in_names(self.all_layers)

    @functools.cached_property
    def names(self) -> tuple[Names, ...]:
        """Begin of the names of each of `all_layers`."""
        return layer_names(self.layers, self.depth_layers, self.own_depths)

    @property
    def has_dense_layers(self) -> bool:
        """True if some layers have a dense feed-forward layer. Raises ConfigurationError as `layers` does."""
        return any(layer.feed_forward == "dense" for layer in self.all_layers)

    @property
    def has_latents(self) -> bool:
        """True if attention is over latents. No network has attention of both kinds."""
        return bool(KINDS_WITH_LATENTS & self.kinds)

    @property
    def trains_indexers(self) -> bool:
        """True if the indexers of sparse attention have a loss; otherwise they are frozen."""
        return bool(self.dsa_indexer_loss_coeff) and "sparse_attention" in self.kinds

    @property
    def trains_indexers_alone(self) -> bool:
        """True if all weights but those of indexers are frozen."""
        return self.dsa_stage != "sparse" and "sparse_attention" in self.kinds

    @property
    def score_width(self) -> int:
        """Channels of a head of queries, keys and values, the widest of them, where scores are computed."""
        if self.has_latents:
            return max(self.qk_head_dim + self.qk_pos_emb_head_dim, self.v_head_dim)
        return self.head_dim

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.hidden_size // self.num_attention_heads if self.kv_channels is None else self.kv_channels

    @property
    def mamba_heads(self) -> int:
        """Heads of a Mamba-2 layer."""
        heads = self.mamba_num_heads
        return 2 * self.hidden_size // self.mamba_head_dim if heads is None else heads

    @property
    def activation(self) -> Activation:
        """Activation of the feed-forward layer."""
        return activation_of({flag for flag in FLAGS if getattr(self, flag)})

    @property
    def ffn_size(self) -> int:
        """Width of the feed-forward layer; with a gate, the width of each half (gate and up)."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        # With a gate there are three matrices, not two, so each has two thirds of the size. Megatron-LM's formula gives
        # 0 below hidden size 24.
        return max(8 * self.hidden_size // 3 // 64 * 64, 64) if self.activation.gated else 4 * self.hidden_size

    @property
    def expert_ffn_size(self) -> int:
        """Width of an expert; with a gate, the width of each half."""
        return self.ffn_size if self.moe_ffn_hidden_size is None else self.moe_ffn_hidden_size

    @property
    def expert_hidden_size(self) -> int:
        """Width of the rows that routed experts process."""
        return self.hidden_size if self.moe_latent_size is None else self.moe_latent_size

    @property
    def balances_by_quantiles(self) -> bool:
        """True if routers take an offset from each expert's logits before the choice."""
        return "quantile_balancing" in self.moe_router_load_balancing_type and self.num_experts is not None

    @property
    def topk_scaling_factor(self) -> float:
        """Factor of the weights of the chosen experts."""
        return 1.0 if self.moe_router_topk_scaling_factor is None else self.moe_router_topk_scaling_factor

    @property
    def routing_group_scores(self) -> int | None:
        """Number of best scores whose sum is the score of a group of experts; None without groups."""
        if self.moe_router_group_scores is not None or self.moe_router_group_topk is None:
            return self.moe_router_group_scores
        return self.moe_router_topk // self.moe_router_group_topk

    @property
    def output_init_std(self) -> float:
        """Standard deviation of the initial weights of a block's output layers."""
        residuals = self.num_layers * (1 if self.hybrid_layer_pattern is not None else 2)
        return self.init_method_std / math.sqrt(residuals)

    @property
    def kv_groups(self) -> int:
        """Number of heads of keys and values."""
        return self.num_query_groups if self.group_query_attention else self.num_attention_heads

    def padded_vocab_size(self, tensor_parallel_size: int) -> int:
        """Rows of the embedding over all ranks. Raises ConfigurationError if the vocabulary size is unknown."""
        if self.vocab_size is None:
            raise ConfigurationError("the vocabulary size is unknown: give --vocab-size or a tokenizer that has one")
        multiple = self.make_vocab_size_divisible_by * tensor_parallel_size
        return -(-self.vocab_size // multiple) * multiple


def as_gpt(model: ModelConfig, *, in_any_order: bool = False) -> ModelConfig:
    """Return the GPT that a network with a pattern is: attention and a feed-forward layer in turn. Otherwise itself.

    `in_any_order`: also return the GPT with as many of each, whose weights have the names of this network's.
    """
    mixers = [layer for layer in model.layers if layer.mixer is not None]
    if any(layer.mixer != "attention" for layer in mixers):
        return model
    feeds = [layer for layer in model.layers if layer.feed_forward is not None]
    in_turn = [layer.mixer is not None for layer in model.layers] == [True, False] * len(mixers)
    behind = [int(layer.output_norm) for layer in mixers]
    if model.hybrid_layer_pattern is None or behind != [int(layer.output_norm) for layer in feeds]:
        return model
    if len(mixers) != len(feeds) or not (in_turn or in_any_order):
        return model
    if model.depths and pattern_of(model.depth_layers) != pattern_of(model.layers[-2:]):
        return model
    with_experts = [int(layer.feed_forward == "moe") for layer in feeds]
    windowed = [int(layer.keys_before is not None) for layer in mixers]
    return replace(
        model,
        num_layers=len(mixers),
        moe_layer_freq=None if model.num_experts is None else str(with_experts),
        window_attn_skip_freq=None if model.window_size is None else str(windowed),
        no_rope_freq=None if model.no_rope_freq is None else str([int(not layer.rotary) for layer in mixers]),
        output_norm_freq=None if model.output_norm_freq is None else str(behind),
        hybrid_layer_pattern=None,
        mtp_hybrid_override_pattern=None,
    )


def with_layers(model: ModelConfig, layers: Sequence[LayerSpec]) -> ModelConfig:
    """Return the network that has these layers, of the kinds of those of `model`, in place of its own."""
    with_experts = [int(spec.feed_forward == "moe") for spec in layers]
    windowed = [int(spec.keys_before is not None) for spec in layers]
    unrotated = [int(not spec.rotary) for spec in layers]
    behind = [int(spec.output_norm) for spec in layers]
    linear = [int(not spec.attends) for spec in layers]
    patterned = model.hybrid_layer_pattern is not None
    return replace(
        model,
        num_layers=len(layers),
        hybrid_layer_pattern=pattern_of(layers) if patterned else None,
        moe_layer_freq=None if patterned or model.num_experts is None else str(with_experts),
        window_attn_skip_freq=None if model.window_size is None else str(windowed),
        no_rope_freq=None if model.no_rope_freq is None else str(unrotated),
        output_norm_freq=None if model.output_norm_freq is None else str(behind),
        linear_attention_freq=None if model.linear_attention_freq is None else str(linear),
        dsa_indexer_topk_freq=1,
    )
