"""Options of the network: sizes, positions, activations, norms, initialisation."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from megalite.config.activations import FLAGS, Activation, activation_of
from megalite.config.attention_windows import keys_before
from megalite.config.layers import LayerSpec
from megalite.errors import ConfigurationError


@dataclass(frozen=True)
class ModelConfig:
    """The network. Names and defaults are Megatron-LM's; flags that are negative there are positive here."""

    num_layers: int
    """Transformer layers."""
    hidden_size: int
    """Width of the residual stream."""
    num_attention_heads: int
    """Attention (query) heads."""
    ffn_hidden_size: int | None = None
    """Width of the feed-forward layer; unset: 4 x hidden-size, with a gate 8/3 of it down to a multiple of 64."""
    kv_channels: int | None = None
    """Width of one attention head; unset: hidden-size / num-attention-heads."""
    group_query_attention: bool = False
    """Share keys and values between groups of query heads; their number is num-query-groups."""
    num_query_groups: int = 1
    """Groups of query heads that share keys and values (1: multi-query); needs group-query-attention."""
    max_position_embeddings: int | None = None
    """Rows of the learned position table; needed by learned_absolute, at least seq-length."""
    position_embedding_type: Literal["learned_absolute", "rope", "yarn", "none"] = "learned_absolute"
    """Positions of tokens: a learned table, rotary embeddings, these as YaRN scales them, or none at all."""
    rotary_base: float = 10000.0
    """Base of the rotary frequencies (theta)."""
    rotary_percent: float = 1.0
    """Share of each head's channels that is rotated, above 0 up to 1."""
    rotary_interleaved: bool = False
    """Rotate channel 2i with 2i + 1, instead of channels that are half of the rotated ones apart."""
    rotary_seq_len_interpolation_factor: float | None = None
    """Divide the rotary angles by this: so many times the trained positions fit in (linear scaling); unset: 1."""
    use_rope_scaling: bool = False
    """Scale the rotary frequencies as Llama 3.1 does for long contexts."""
    rope_scaling_factor: float = 8.0
    """Factor of the Llama 3.1 scaling; acts with use-rope-scaling, like the next three."""
    rope_scaling_low_freq_factor: float = 1.0
    """Frequencies with fewer turns than this over the original context are divided by the whole factor."""
    rope_scaling_high_freq_factor: float = 4.0
    """Frequencies with more turns than this over the original context are kept."""
    rope_scaling_original_max_position_embeddings: int = 8192
    """Context length before the Llama 3.1 scaling."""
    rotary_scaling_factor: float = 1.0
    """Multiple of the original context that YaRN (arXiv:2309.00071) is to reach; yarn needs one above 1."""
    yarn_original_max_position_embeddings: int | None = None
    """Context length before YaRN; needed by yarn."""
    yarn_beta_fast: float = 32.0
    """Frequencies with more turns than this over YaRN's original context are kept."""
    yarn_beta_slow: float = 1.0
    """Frequencies with fewer turns than this over YaRN's original context are divided by the whole factor."""
    yarn_correction_range_round_to_int: bool = True
    """Round the channels between which YaRN blends outwards to whole numbers."""
    mscale: float = 1.0
    """YaRN multiplies queries and keys by (0.1 x mscale x ln factor + 1) / (0.1 x mscale-all-dim x ln factor + 1)."""
    mscale_all_dim: float = 0.0
    """Acts as mscale says."""
    yarn_attention_factor: float | None = None
    """Factor of queries and keys under YaRN, whatever mscale and mscale-all-dim; unset: as they say."""
    window_size: str | None = None
    """LEFT,0: a token sees this many keys before its own and none after it; unset: all before it."""
    window_attn_skip_freq: str | None = None
    """Layers without the window: N, every N-th; or for each layer 1 (with) or 0, like ([1]*5+[0])*4; unset: none."""
    window_rotary_base: float | None = None
    """Base of the rotary frequencies in layers with the window, not scaled there (Gemma 3); unset: as in all layers."""
    scale_embeddings: bool = False
    """Multiply word embeddings by the root of hidden-size, rounded to the weights' precision (Gemma)."""
    query_pre_attn_scalar: float | None = None
    """Divide attention's scores by the root of this; unset: of the width of a head."""
    attn_logit_softcapping: float | None = None
    """Bend each of attention's scores s to c x tanh(s / c), c being this, so that none is beyond it (Gemma 2)."""
    final_logit_softcapping: float | None = None
    """Bend the output's logits in the same way."""
    use_parallel_residual: bool = False
    """Let the feed-forward layer read what attention reads, and add both to it (GPT-J, GPT-NeoX)."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Kind of norm before attention, before the feed-forward layer and at the end."""
    norm_epsilon: float = 1e-5
    """Added to the variance under the root of each norm."""
    sandwich_norm: bool = False
    """Normalise also what attention and the feed-forward layer put out, before it is added (Gemma 2)."""
    apply_layernorm_1p: bool = False
    """Keep every norm's weight as its distance from 1, so that it starts at 0."""
    qk_layernorm: bool = False
    """Normalise each head's queries and keys."""
    swiglu: bool = False
    """Feed-forward with a SiLU gate instead of GELU."""
    geglu: bool = False
    """Feed-forward with a GELU gate (Gemma) instead of GELU."""
    squared_relu: bool = False
    """Feed-forward with the square of ReLU instead of GELU."""
    exact_gelu: bool = False
    """GELU by the error function instead of its tanh form (Megatron-LM's has that where it is fused with a bias)."""
    add_bias_linear: bool = True
    """Biases in the linear layers (Megatron's --disable-bias-linear turns them off)."""
    add_qkv_bias: bool = False
    """A bias on queries, keys and values alone, where add-bias-linear is off."""
    untie_embeddings_and_output_weights: bool = False
    """Give the output layer a weight of its own instead of the embedding's."""
    vocab_size: int | None = None
    """Tokens of the vocabulary before padding; unset: the tokenizer's."""
    make_vocab_size_divisible_by: int = 128
    """The vocabulary is padded to a multiple of this times the tensor-parallel size."""
    init_method_std: float = 0.02
    """Standard deviation of the initial weights; output layers of a block get it / sqrt(2 x num-layers)."""
    hidden_dropout: float = 0.1
    """Dropout on the residual branches and after the embedding."""
    attention_dropout: float = 0.1
    """Dropout on the attention probabilities."""

    @property
    def rotary(self) -> bool:
        """True if queries and keys are turned by their position."""
        return self.position_embedding_type in ("rope", "yarn")

    @functools.cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The layers, one by one. Raises ConfigurationError if a flag does not tell what they are."""
        windows = keys_before(self.window_size, self.window_attn_skip_freq, self.num_layers)
        return tuple(LayerSpec(keys_before=before) for before in windows)

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.hidden_size // self.num_attention_heads if self.kv_channels is None else self.kv_channels

    @property
    def activation(self) -> Activation:
        """The feed-forward layer's."""
        return activation_of({flag for flag in FLAGS if getattr(self, flag)})

    @property
    def ffn_size(self) -> int:
        """Width of the feed-forward layer (of each half, gate and up, with a gate)."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        # Two thirds, since the gate makes three matrices of two. Megatron's formula gives 0 below hidden size 24.
        return max(8 * self.hidden_size // 3 // 64 * 64, 64) if self.activation.gated else 4 * self.hidden_size

    @property
    def kv_groups(self) -> int:
        """Heads of keys and values."""
        return self.num_query_groups if self.group_query_attention else self.num_attention_heads

    def padded_vocab_size(self, tensor_parallel_size: int) -> int:
        """Rows of the embedding over all ranks. Raises ConfigurationError while the vocabulary is unknown."""
        if self.vocab_size is None:
            raise ConfigurationError("the vocabulary is unknown: give --vocab-size or a tokenizer that has one")
        multiple = self.make_vocab_size_divisible_by * tensor_parallel_size
        return -(-self.vocab_size // multiple) * multiple
