"""The network on one process, with each of its features, against the oracle."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megalite.config.layer_specs import LayerSpec
from megalite.config.model import ModelConfig
from megalite.config.pipeline_layout import StageLayers
from megalite.model.batch import LogitLoss, MicroBatch, TokenLoss, first_keys
from megalite.model.gpt import GPT, messages
from megalite.model.head import LossConfig
from megalite.model.layer_kinds import make_norm
from megalite.model.recompute import Recompute
from megalite.parallel.context import ParallelContext
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import named_pieces
from megalite.parallel.randomness import RandomKey
from megalite.parallel.sequence import SequenceLayout
from megalite.parallel.stage import StageOutput, TensorSpec
from tests.distributed.layout_expected import one_thread
from tests.distributed.layout_run import perturb_constants
from tests.harness.close import assert_gradient_close
from tests.harness.stages import LOSS, logits_of, loss_of
from tests.oracle import Oracle, loss_sum_and_count

BATCH, SEQUENCE, VOCABULARY = 3, 11, 19
SAMPLES = (5, 6, 7)

GPT2 = ModelConfig(
    num_layers=2, hidden_size=16, num_attention_heads=4, ffn_hidden_size=20, max_position_embeddings=16,
    vocab_size=VOCABULARY, make_vocab_size_divisible_by=8, init_method_std=0.3, hidden_dropout=0.0,
    attention_dropout=0.0,
)  # fmt: skip
LLAMA = replace(
    GPT2, position_embedding_type="rope", normalization="RMSNorm", swiglu=True, add_bias_linear=False,
    untie_embeddings_and_output_weights=True, max_position_embeddings=None,
)  # fmt: skip
WINDOWS = {("3,0", None): (4, 4), ("0,0", "[0,1]"): (None, 1), ("2,0", "2"): (3, None, 3)}
"""Number of tokens that a token sees in each layer, by the two flags."""
UNROTATED = {None: (), "2": (1,), "[1,0]": (0,)}
"""Layers without rotary positions, by the flag."""
NEOX = replace(
    GPT2, use_parallel_residual=True, position_embedding_type="rope", rotary_percent=0.5,
    untie_embeddings_and_output_weights=True, max_position_embeddings=None,
)  # fmt: skip
GEMMA = replace(
    LLAMA, num_layers=3, window_size="2,0", window_attn_skip_freq="2", sandwich_norm=True, scale_embeddings=True,
    swiglu=False, geglu=True, apply_layernorm_1p=True, query_pre_attn_scalar=7.0, attn_logit_softcapping=2.0,
    final_logit_softcapping=3.0, untie_embeddings_and_output_weights=False, group_query_attention=True,
    num_query_groups=2,
)  # fmt: skip
GEMMA3 = replace(
    GEMMA, qk_layernorm=True, rotary_base=1e6, window_rotary_base=1e4, rotary_seq_len_interpolation_factor=8.0,
    attn_logit_softcapping=None, final_logit_softcapping=None,
)  # fmt: skip
YARN = replace(
    LLAMA, kv_channels=32, position_embedding_type="yarn", rotary_scaling_factor=8.0,
    yarn_original_max_position_embeddings=1024,
)  # fmt: skip
CONFIGS = {
    "gpt2": GPT2,
    "gpt2, untied": replace(GPT2, untie_embeddings_and_output_weights=True),
    "gpt2, squared relu": replace(GPT2, squared_relu=True),
    "gpt2, no positions": replace(GPT2, position_embedding_type="none"),
    "gpt2, other epsilon": replace(GPT2, norm_epsilon=0.1),
    "llama": LLAMA,
    "llama, tied": replace(LLAMA, untie_embeddings_and_output_weights=False),
    "llama, biases on queries, keys and values": replace(LLAMA, add_qkv_bias=True),
    "llama, part of each head rotated": replace(LLAMA, kv_channels=6, rotary_percent=0.7),
    "llama, neighbours rotated": replace(
        LLAMA,
        kv_channels=10,
        rotary_percent=0.6,
        rotary_interleaved=True,
        group_query_attention=True,
        num_query_groups=2,
    ),
    "llama, another base": replace(LLAMA, rotary_base=500.0),
    "llama 3.1": replace(LLAMA, kv_channels=16, rotary_base=500_000.0, use_rope_scaling=True, rope_scaling_factor=4.0),
    "llama 3.1, other ends": replace(
        LLAMA,
        kv_channels=32,
        use_rope_scaling=True,
        rope_scaling_low_freq_factor=2.0,
        rope_scaling_high_freq_factor=5.0,
        rope_scaling_original_max_position_embeddings=512,
    ),
    "llama, linear": replace(LLAMA, rotary_seq_len_interpolation_factor=2.5),
    "llama, yarn": YARN,
    "llama, yarn, other ends": replace(
        YARN,
        yarn_beta_fast=16.0,
        yarn_beta_slow=2.0,
        yarn_correction_range_round_to_int=False,
        mscale=0.7,
        mscale_all_dim=0.4,
        rotary_percent=0.7,
    ),
    "llama, yarn, attention factor": replace(YARN, yarn_attention_factor=1.5, mscale=0.5),
    "llama, groups": replace(LLAMA, group_query_attention=True, num_query_groups=2, qk_layernorm=True),
    "llama, one layer without positions": replace(LLAMA, no_rope_freq="2"),
    "llama, no positions in windows": replace(
        LLAMA, window_size="3,0", window_rotary_base=500.0, no_rope_freq="[1,0]", position_embedding_type="rope"
    ),
    "llama, quick geglu": replace(LLAMA, swiglu=False, quick_geglu=True, add_bias_linear=True),
    "gpt-oss's activation": replace(
        LLAMA, swiglu=False, quick_geglu=True, glu_linear_offset=1.0, activation_func_clamp_value=0.5
    ),
    "llama, clamped": replace(LLAMA, activation_func_clamp_value=0.5),
    "gpt2, geglu with an offset": replace(GPT2, geglu=True, glu_linear_offset=0.25),
    "llama, norms over all heads": replace(
        LLAMA, qk_layernorm=True, qk_layernorm_over_heads=True, group_query_attention=True, num_query_groups=2
    ),
    "gpt2, sinks": replace(GPT2, softmax_type="learnable"),
    "gpt2, off by one": replace(GPT2, softmax_type="off-by-one"),
    "gemma, sinks": replace(GEMMA, softmax_type="learnable"),
    "gpt2, gated output": replace(GPT2, attention_output_gate=True),
    "llama, groups and a gated output": replace(
        LLAMA, group_query_attention=True, num_query_groups=2, qk_layernorm=True, attention_output_gate=True
    ),
    "gpt2, exact gelu": replace(GPT2, exact_gelu=True),
    "gpt2, geglu": replace(GPT2, geglu=True),
    "gpt2, exact geglu": replace(GPT2, geglu=True, exact_gelu=True),
    "gpt2, norms around one": replace(GPT2, apply_layernorm_1p=True, qk_layernorm=True),
    "gpt2, scaled embeddings": replace(GPT2, scale_embeddings=True),
    "gpt2, multipliers": replace(
        GPT2, embedding_multiplier=3.0, residual_multiplier=0.4, logits_scaling=2.5, final_logit_softcapping=1.5
    ),
    "gpt-neox, multipliers": replace(NEOX, residual_multiplier=0.4, scale_embeddings=True, embedding_multiplier=2.0),
    "gpt2, capped logits": replace(GPT2, final_logit_softcapping=1.5),
    "gpt2, windows": replace(GPT2, window_size="3,0"),
    "llama, one window": replace(LLAMA, window_size="0,0", window_attn_skip_freq="[0,1]"),
    "gpt2, sandwich norms": replace(GPT2, sandwich_norm=True),
    "gpt2, norms behind": replace(GPT2, output_norm_freq="1"),
    "llama, norms behind one layer": replace(LLAMA, output_norm_freq="[1,0]", qk_layernorm=True),
    "llama, query scale": replace(LLAMA, query_pre_attn_scalar=7.0),
    "llama, capped scores": replace(LLAMA, attn_logit_softcapping=1.5, group_query_attention=True, num_query_groups=2),
    "gpt-neox": NEOX,
    "gemma": GEMMA,
    "gemma 3": GEMMA3,
    "llama 3.1, plain in windows": replace(
        LLAMA,
        kv_channels=16,
        use_rope_scaling=True,
        rope_scaling_original_max_position_embeddings=64,
        window_size="3,0",
        window_rotary_base=500.0,
    ),
    "llama, yarn, plain in windows": replace(YARN, window_size="3,0", window_rotary_base=500.0),
    "one of everything": replace(GPT2, num_layers=1, num_attention_heads=1, hidden_size=2, ffn_hidden_size=1),
}


@pytest.fixture(autouse=True)
def small_tensors() -> Iterator[None]:
    with one_thread():
        yield


def network(config: ModelConfig, **rest: object) -> GPT:
    made = GPT(config, ParallelMesh(), dtype=torch.float64, **rest)  # type: ignore[arg-type]
    initialize(made, 1234)
    perturb_constants(made)
    return made


def weights(made: GPT) -> dict[str, Tensor]:
    return {p.tensor.name: p.view(q).detach().clone().requires_grad_() for q, p in named_pieces(made)}


def activation(config: ModelConfig) -> str:
    if config.quick_geglu:
        return "quick_geglu"
    if config.geglu:
        return "exact_geglu" if config.exact_gelu else "geglu"
    return next((name for name in ("swiglu", "squared_relu", "exact_gelu") if getattr(config, name)), "gelu")


def oracle(config: ModelConfig) -> Oracle:
    return Oracle(
        normalization=config.normalization,
        norm_epsilon=config.norm_epsilon,
        norm_around_one=config.apply_layernorm_1p,
        activation=activation(config),
        glu_offset=config.glu_linear_offset,
        glu_limit=config.activation_func_clamp_value or math.inf,
        off_by_one=config.softmax_type == "off-by-one",
        unrotated=UNROTATED[config.no_rope_freq],
        windows=WINDOWS.get((config.window_size, config.window_attn_skip_freq), ()),
        embedding_scale=(math.sqrt(config.hidden_size) if config.scale_embeddings else 1.0)
        * config.embedding_multiplier,
        residual_scale=config.residual_multiplier,
        logit_divisor=config.logits_scaling,
        score_divisor=math.sqrt(config.query_pre_attn_scalar or config.head_dim),
        score_cap=config.attn_logit_softcapping or math.inf,
        logit_cap=config.final_logit_softcapping or math.inf,
        parallel_residual=config.use_parallel_residual,
        position_embedding_type=config.position_embedding_type,
        rotary_base=config.rotary_base,
        window_rotary_base=config.window_rotary_base,
        rotary_percent=config.rotary_percent,
        rotary_interleaved=config.rotary_interleaved,
        interpolation=config.rotary_seq_len_interpolation_factor or 1.0,
        use_rope_scaling=config.use_rope_scaling,
        rope_scaling_factor=config.rope_scaling_factor,
        rope_scaling_turns=(config.rope_scaling_low_freq_factor, config.rope_scaling_high_freq_factor),
        rope_scaling_original=config.rope_scaling_original_max_position_embeddings,
        yarn_factor=config.rotary_scaling_factor,
        yarn_original=config.yarn_original_max_position_embeddings or 1,
        yarn_turns=(config.yarn_beta_slow, config.yarn_beta_fast),
        yarn_whole_pairs=config.yarn_correction_range_round_to_int,
        yarn_mscales=(config.mscale, config.mscale_all_dim),
        yarn_attention_factor=config.yarn_attention_factor,
    )


DOCUMENTS = torch.tensor([[0] * 4 + [1] * 5 + [2] * 2]).expand(BATCH, -1)


def micro_batch(*, documents: bool, far: int = 0) -> MicroBatch:
    """Return a micro-batch. `far`: positions as if the sample began there."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
    first = first_keys(DOCUMENTS) if documents else None
    positions = torch.tensor([[*range(4), *range(5), *range(2)]]) if documents else torch.arange(SEQUENCE)[None]
    mask = torch.rand(BATCH, SEQUENCE, generator=generator, dtype=torch.float64)
    key = RandomKey(0, SAMPLES)
    return MicroBatch(text[:, :-1], positions.expand(BATCH, -1) + far, first, text[:, 1:], mask, key)


def test_samples_cut_for_other_ranks_are_refused() -> None:
    """Without the error, half a sequence would silently give wrong logits."""
    halves = SequenceLayout(2 * SEQUENCE, ((range(SEQUENCE),), (range(SEQUENCE, 2 * SEQUENCE),)))
    with pytest.raises(ValueError, match="cut for 2 ranks, and the network has 1 context-parallel"):
        network(LLAMA)({}, replace(micro_batch(documents=False), layout=halves))
    two = GPT(LLAMA, ParallelMesh(world_size=2, context_parallel_size=2, device=torch.device("meta")))
    with pytest.raises(ValueError, match="cut for 1 ranks, and the network has 2 context-parallel"):
        two({}, micro_batch(documents=False))


def test_a_micro_batch_with_two_losses_is_refused() -> None:
    """Without the error, that of the logits would never be computed."""
    both = {"token_loss": TokenLoss(lambda *found: {}), "logit_loss": LogitLoss("distill_loss", lambda logits: logits)}
    with pytest.raises(ValueError, match="with a loss of its own has no distill_loss beside it"):
        network(LLAMA)({}, replace(micro_batch(documents=False), **both))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("documents", [False, True], ids=["whole", "documents"])
def test_loss_gradients_and_logits_are_the_oracles(name: str, documents: bool) -> None:
    config = CONFIGS[name]
    made = network(config)
    batch = micro_batch(documents=documents, far=10_000 if config.rotary else 0)
    expected_weights = weights(made)
    logits = oracle(config).logits(expected_weights, batch.tokens, batch.positions, DOCUMENTS if documents else None)
    assert batch.labels is not None
    assert batch.loss_mask is not None
    expected, _ = loss_sum_and_count(logits, batch.labels, batch.loss_mask)
    expected.backward()
    loss = loss_of(made, batch)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    norm = torch.stack([weight.grad.norm() for weight in expected_weights.values()]).norm().item()
    for parameter, piece in named_pieces(made):
        name = piece.tensor.name
        assert_gradient_close(piece.view(parameter.grad), expected_weights[name].grad, norm, name)
    bare = replace(batch, labels=None, loss_mask=None)
    ours = logits_of(made, bare)[..., :VOCABULARY].transpose(0, 1)
    torch.testing.assert_close(ours, logits, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_no_token_sees_another_document_or_the_future(name: str) -> None:
    """Through the gradient of one token's loss with respect to the word embedding's rows: only visible ids move."""
    made = network(replace(CONFIGS[name], vocab_size=SEQUENCE, untie_embeddings_and_output_weights=True))
    batch = micro_batch(documents=True)
    mask = torch.zeros(1, SEQUENCE, dtype=torch.float64)
    mask[0, 6] = 1.0  # the third token of the second document
    one = MicroBatch(
        torch.arange(SEQUENCE)[None], batch.positions[:1], batch.first_keys[:1], torch.zeros(1, SEQUENCE).long(),
        mask, batch.key,
    )  # fmt: skip
    loss_of(made, one).backward()
    seen = made.embedding.word.weight.grad[:SEQUENCE].any(dim=1)
    assert seen.nonzero().flatten().tolist() == [4, 5, 6]


def test_dropout_is_for_training_alone() -> None:
    made = network(replace(GPT2, hidden_dropout=0.5, attention_dropout=0.5))
    without = network(GPT2)
    batch = micro_batch(documents=False)
    assert loss_of(made, batch).item() != loss_of(without, batch).item()
    made.eval()
    assert loss_of(made, batch).item() == loss_of(without, batch).item()


@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
def test_terms_of_the_loss_are_for_training_alone(fused: bool) -> None:
    terms = {"label_smoothing": 0.2, "z_loss": 0.1}
    made = network(GEMMA, loss=LossConfig(fused=fused, **terms))
    batch = micro_batch(documents=False)
    logits = oracle(GEMMA).logits(weights(made), batch.tokens, batch.positions)
    trained, _ = loss_sum_and_count(logits, batch.labels, batch.loss_mask, **terms)
    evaluated, _ = loss_sum_and_count(logits, batch.labels, batch.loss_mask)
    torch.testing.assert_close(loss_of(made, batch), trained, rtol=1e-10, atol=0)
    torch.testing.assert_close(loss_of(made.eval(), batch), evaluated, rtol=1e-10, atol=0)


@pytest.mark.parametrize(
    ("config", "kind"), [(GPT2, "hidden_dropout"), (GPT2, "attention_dropout"), (GEMMA, "attention_dropout")]
)
def test_dropout_differs_from_sample_to_sample(config: ModelConfig, kind: str) -> None:
    """The samples have the same text and different keys."""
    made = network(replace(config, **{kind: 0.1}))
    batch = micro_batch(documents=False)
    losses = [loss_of(made, replace(batch, key=RandomKey(0, (*SAMPLES[:-1], sample)))).item() for sample in range(8)]
    assert len(set(losses)) == 8
    assert loss_of(made, replace(batch, key=RandomKey(0, (*SAMPLES[:-1], 3)))).item() == losses[3]


def test_an_operator_with_a_mask_of_its_own_draws_it_by_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a GPU; here torch's operator takes its numbers from the CPU's generator."""
    for place in ("megalite.model.attention_core", "megalite_kernels.attention"):
        monkeypatch.setattr(f"{place}.draws_its_own", lambda *arguments: True)
    made = network(replace(GPT2, attention_dropout=0.1))
    batch = micro_batch(documents=False)
    numbers = (5, 6, 5)
    losses = [loss_of(made, replace(batch, key=RandomKey(0, (number, 8, 9)))).item() for number in numbers]
    assert losses[0] == losses[2] != losses[1]


def test_capped_scores_are_recomputed_with_the_same_dropout() -> None:
    """Against differences of the loss: one element of the query weights drops the same probabilities each time."""
    made = network(replace(GEMMA, attention_dropout=0.3))
    batch = micro_batch(documents=False)
    loss_of(made, batch).backward()
    weight = made.layers[0].attention.query_key_value.weights[0]
    losses = []
    with torch.no_grad():
        for step in (1e-5, -2e-5):
            weight[0, 0] += step
            losses.append(loss_of(made, batch).item())
    assert (losses[0] - losses[1]) / 2e-5 == pytest.approx(weight.grad[0, 0].item(), rel=1e-5)


def test_a_window_as_wide_as_the_sequence_is_none() -> None:
    batch, loss = micro_batch(documents=False), loss_of(network(GPT2), micro_batch(documents=False)).item()
    assert loss_of(network(replace(GPT2, window_size=f"{SEQUENCE - 1},0")), batch).item() == loss
    assert loss_of(network(replace(GPT2, window_size=f"{SEQUENCE - 2},0")), batch).item() != loss


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_a_weight_around_one_keeps_its_digits_in_bf16(normalization: str) -> None:
    """1.002 itself is 1 in bf16."""
    config = replace(GPT2, normalization=normalization, apply_layernorm_1p=True)
    norm = make_norm(config)(ParallelContext(ParallelMesh(), dtype=torch.bfloat16), "norm", 512)
    torch.manual_seed(0)
    states = torch.randn(64, 512, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.zero_()
        plain = norm(states)
        norm.weight.fill_(0.002)
        stretched = norm(states)
    assert stretched.dtype == torch.bfloat16
    assert (stretched.float().abs().sum() / plain.float().abs().sum()).item() == pytest.approx(1.002, rel=2e-4)


def test_embeddings_are_scaled_in_the_precision_of_the_weights() -> None:
    made = GPT(replace(GPT2, hidden_size=12, scale_embeddings=True), ParallelMesh(), dtype=torch.bfloat16)
    initialize(made, 1)
    made.embedding.position.data.zero_()
    batch = micro_batch(documents=False)
    words = made.embedding.word.weight[batch.tokens.t()]
    scale = torch.tensor(math.sqrt(12), dtype=torch.bfloat16)
    assert scale.item() != math.sqrt(12)
    assert torch.equal(made.embedding(batch.tokens, batch.positions, batch.key, batch.layout.runs), words * scale)


def test_branches_of_parts_of_the_sequence_are_multiplied() -> None:
    config = CONFIGS["gpt2, multipliers"]
    whole, in_parts = network(config), network(config, recompute=Recompute(mlp_parts=3))
    batch = micro_batch(documents=False)
    torch.testing.assert_close(loss_of(in_parts, batch), loss_of(whole, batch), rtol=1e-12, atol=0)


def test_recompute_spans() -> None:
    assert Recompute().spans(5) == [(0, 5, False)]
    assert Recompute(attention=True).spans(5) == [(0, 5, False)]
    assert Recompute(method="uniform", layers=2).spans(5) == [(0, 2, True), (2, 4, True), (4, 5, True)]
    assert Recompute(method="block", layers=2).spans(5) == [(0, 1, True), (1, 2, True), (2, 5, False)]
    assert Recompute(method="block", layers=9).spans(2)[:2] == [(0, 1, True), (1, 2, True)]


@pytest.mark.parametrize(
    ("how", "fewer"), [({"attention": True}, 0.98), ({"method": "block"}, 0.8), ({"method": "uniform"}, 0.5)]
)
def test_recomputation_keeps_less(how: dict, fewer: float) -> None:
    config = replace(LLAMA, num_layers=4)

    def bytes_saved(made: GPT) -> int:
        total = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal total
            total += tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            made({}, micro_batch(documents=False))
        return total

    assert bytes_saved(network(config, recompute=Recompute(**how))) < fewer * bytes_saved(network(config))


def test_a_stage_has_the_windows_of_its_own_layers() -> None:
    """A window that the first stage's layers do not have, and one layer of several with it."""
    config = replace(CONFIGS["gpt2, windows"], num_layers=4, window_attn_skip_freq="[0,0,1,0]")
    whole, batch = network(config), micro_batch(documents=False)
    passed: Mapping[str, Tensor] = {}
    for first in range(0, 4, 2):
        stage = network(config, stage_layers=StageLayers(first, 2, embedding=first == 0, loss=first == 2))
        passed, terms, _ = stage(passed, batch)
    torch.testing.assert_close(terms[LOSS], loss_of(whole, batch), rtol=1e-12, atol=0)


@pytest.mark.parametrize("stages", [1, 2])
def test_each_layer_has_its_own_window(stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers to a stage, of two windows or one; the last sees all."""
    windows = (3, 6, 4, None)
    specs = tuple(LayerSpec(keys_before=window and window - 1) for window in windows)
    config, batch = replace(CONFIGS["llama"], num_layers=4), micro_batch(documents=True)
    monkeypatch.setattr(ModelConfig, "layers", specs)
    layers, whole = 4 // stages, network(config)
    passed: Mapping[str, Tensor] = {}
    for number in range(stages):
        part = StageLayers(number * layers, layers, embedding=number == 0, loss=number == stages - 1)
        passed, terms, _ = network(config, stage_layers=part)(passed, batch)
    logits = replace(oracle(config), windows=windows).logits(weights(whole), batch.tokens, batch.positions, DOCUMENTS)
    assert batch.labels is not None
    assert batch.loss_mask is not None
    expected, _ = loss_sum_and_count(logits, batch.labels, batch.loss_mask)
    torch.testing.assert_close(terms[LOSS], expected, rtol=1e-10, atol=0)


def test_a_stage_passes_on_what_the_network_declares() -> None:
    stage = network(LLAMA, stage_layers=StageLayers(0, 1, embedding=True, loss=False))
    output: StageOutput = stage({}, micro_batch(documents=False))
    found = [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in output.tensors.items()]
    passed = messages(LLAMA, 2, sequence=SEQUENCE, batch=BATCH, dtype=torch.float64)
    assert passed == (tuple(found),)
