"""--hybrid-layer-pattern: its grammar, what contradicts it, and the GPTs that are patterns."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
import torch
from torch import nn

import megalite
from megalite.checkpoint.compatibility import check_same_function, function_of, model_config
from megalite.config import ModelConfig, RunConfig, dump, load_yaml
from megalite.config.fields import named
from megalite.config.kinds.table import KINDS
from megalite.config.layer_specs import LETTERS, LayerSpec, Letter, numbers_in_names, pattern_of
from megalite.config.model import as_gpt
from megalite.config.parse import parse_arguments
from megalite.config.pipeline_layout import stage_layers
from megalite.config.single_rank import take_single_rank
from megalite.config.validate import resolve
from megalite.conversion.families import FAMILIES
from megalite.conversion.family import choose
from megalite.conversion.opened import logical_tensors, tensors_of_training
from megalite.errors import CheckpointError, ConfigurationError
from megalite.inference.network import logits, make_network
from megalite.library.configuration import configured
from megalite.model.cache import StageCache
from megalite.model.gpt import GPT
from megalite.model.layer_kinds import LAYER_KINDS
from megalite.optim.layout import unique_parameters
from megalite.parallel.initialization import set_initial_values
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import named_pieces
from megalite.tasks.flops import flops_per_token
from tests.initial_weights import Network

RUN = (
    "--hidden-size 16 --num-attention-heads 4 --seq-length 8 --max-position-embeddings 8 --mock-data --tokenizer-type "
    "NullTokenizer --vocab-size 30 --micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --train-iters 2"
)
PLAIN = ModelConfig(2, 16, 4, max_position_embeddings=8, vocab_size=30)


def pattern(letters: str, **options: object) -> ModelConfig:
    named = {"num_layers": len(letters), "hybrid_layer_pattern": letters} | options
    return replace(PLAIN, **named)  # type: ignore[arg-type]


def test_a_letter_is_one_half_of_a_block() -> None:
    halves = [(layer.mixer, layer.feed_forward) for layer in pattern("*-E", num_experts=2).layers]
    assert halves == [("attention", None), (None, "dense"), (None, "moe")]


def test_the_number_of_layers_is_that_of_the_letters() -> None:
    config = parse_arguments([*RUN.split(), "--pp", "3", "--hybrid-layer-pattern", "**|-*|"]).config
    assert (config.model.num_layers, pattern_of(config.model.layers)) == (4, "**-*")
    old = parse_arguments([*RUN.split(), "--hybrid-override-pattern=--", "--num-layers", "2"]).config
    assert pattern_of(old.model.layers) == "--"
    _, argv = take_single_rank([*RUN.split(), "--hybrid-layer-pattern=--", "--tp", "1"], 1)
    assert parse_arguments(argv).config.model.hybrid_layer_pattern == "--"


@pytest.mark.parametrize(
    ("letters", "ranks", "stages", "layout"),
    [
        ("*-*-", 2, [2, 2], None),
        ("*|-*-", 2, [1, 3], "Et|tttL"),
        ("*|-||*-", 2, [1, 1, 0, 2], "Et|t||ttL"),
        ("|*-", 2, [0, 2], "E|ttL"),
        ("*--|||", 2, [3, 0, 0, 0], "Ettt|||L"),
    ],
)
def test_a_bar_begins_the_next_stage(letters: str, ranks: int, stages: list[int], layout: str | None) -> None:
    flags = [*RUN.split(), "--pp", str(ranks), "--hybrid-layer-pattern", letters]
    config = resolve(parse_arguments(flags).config, ranks)
    assert [stage.layers for stage in stage_layers(config.model, config.parallel)] == stages
    assert config.parallel.pipeline_model_parallel_layout == layout
    assert config.model.hybrid_layer_pattern == letters.replace("|", "")
    assert load_yaml(dump(config)) == config


def test_stages_of_a_pattern_are_no_part_of_a_network(tmp_path: Path) -> None:
    """Stages of a configuration and a checkpoint of before become the layout; those of flags are those of the run."""
    flags = [*RUN.split(), "--pp", "2"]
    config = parse_arguments([*flags, "--hybrid-layer-pattern", "*-|*-"]).config
    (tmp_path / "run.yaml").write_text(dump(config))
    over = ["--config", str(tmp_path / "run.yaml"), "--hybrid-layer-pattern"]
    assert parse_arguments([*over, "*|-*-"]).config.parallel.pipeline_model_parallel_layout == "Et|tttL"
    assert parse_arguments([*over, "**--"]).config.parallel == config.parallel
    before = dump(config).replace("'*-*-'", "'*-|*-'").replace("Ett|ttL", "null")
    (tmp_path / "run.yaml").write_text(before)
    assert parse_arguments(over[:2]).config == config
    saved = {"model": asdict(replace(config.model, hybrid_layer_pattern="*-|*-"))}
    assert model_config(tmp_path, saved) == config.model


@pytest.mark.parametrize(
    ("letters", "flags", "problem"),
    [
        ("*M-", "--mamba-num-heads 3", "--mamba-num-heads 3 is not a multiple of --mamba-num-groups 8"),
        (
            "*M-",
            "--mamba-head-dim 2 --mamba-num-groups 3",
            "16 (2 x --hidden-size / --mamba-head-dim 2) is not a",
        ),
        (
            "*M-",
            "--mamba-head-dim 7",
            "twice --hidden-size 16 is not a multiple of --mamba-head-dim 7: give --mamba",
        ),
        (
            "M",
            "--mamba-num-heads 8 --mamba-dt-min 2 --mamba-dt-max 1",
            "--mamba-dt-max 1.0 is less than --mamba-dt",
        ),
        ("M", "--mamba-num-heads 9 --mamba-num-groups 3 --tp 2", "2 does not divide the Mamba-2 heads, 9"),
        (
            "M",
            "--mamba-num-heads 6 --mamba-num-groups 3 --tp 2",
            "multiple of --mamba-num-groups 3: ranks cannot",
        ),
        ("G", "--linear-num-value-heads 24", "--linear-num-value-heads 24 is not a multiple of --linear-num-key-heads"),
        ("*", "--mamba-state-dim 64", "--mamba-state-dim needs a Mamba-2 layer, M in --hybrid-layer-pattern"),
        ("M", "--mamba-num-heads 8 --linear-key-head-dim 64", "--linear-key-head-dim needs a gated delta net, G in"),
        ("L", "--kda-num-heads 8", "--kda-num-heads needs Kimi delta attention, K in --hybrid-layer-pattern"),
        ("K", "--kda-lower-bound 0", "--kda-lower-bound 0.0 is not below 0"),
        ("K", "--kda-chunk-size 48", "--kda-chunk-size 48 is not a power of two"),
        ("K", "--kda-num-heads 9 --tp 2", "2 does not divide the heads of Kimi delta attention, 9"),
        ("M", "--mamba-num-heads 8 --short-conv-bias", "--short-conv-bias needs a short convolution, L in"),
        ("L", "--tp 3", "3 does not divide the channels of the short convolution, 16"),
        ("*+", "", "a network has attention (*) or attention over latents (+, D), not both: choose one"),
        (
            "*-",
            "--multi-latent-attention",
            "--multi-latent-attention needs latent attention, + in --hybrid-layer-pattern",
        ),
        ("+-", "--group-query-attention", "--group-query-attention needs attention without latents"),
        ("+-", "--latent-norm-epsilon 1e-6", "--latent-norm-epsilon needs --qk-layernorm, which normalises latents"),
        ("+-", "--tp 3", "--num-attention-heads 4 is not divisible by --tensor-model-parallel-size 3"),
        ("D", "", "sparse attention needs --dsa-indexer-topk"),
        ("*D", "", "a network has attention (*) or attention over latents (+, D), not both: choose one"),
        ("*-/*-/-*", "", "has the depths '*-' and '-*': give all of them the same letters"),
        ("* -", "", "' ', character 2, is unknown; there are M Mamba-2, G gated delta net, K Kimi"),
        ("|", "", "'|' has no layers: give one letter for each"),
        ("*-*", "--num-layers 2", "'*-*' has 3 layers, but --num-layers is 2: leave --num-layers out"),
        ("*E", "", "'*E' has layers with experts (E): give --num-experts, or write - for a dense layer"),
        ("*-", "--num-experts 2", "'*-' has no layer with experts (E): leave --num-experts out, or write one"),
        ("*E", "--num-experts 2 --moe-layer-freq 1", "says which layers have experts (E): leave --moe-layer-freq out"),
        ("*-", "--use-parallel-residual", "has one half of a block in each layer: --use-parallel-residual needs both"),
        ("*-|*|-", "--pp 2", "3 stages of --hybrid-layer-pattern '*-|*|-' cannot be divided evenly among 2 ranks"),
        ("*-", "--window-size 3,0", "give --window-attn-skip-freq as a list with an entry for each letter"),
        ("*-", "--window-size 3,0 --window-attn-skip-freq 2", "because a number counts all letters"),
        ("*-", "--position-embedding-type rope --no-rope-freq 2", "give --no-rope-freq as a list with an entry for"),
        ("*-", "--output-norm-freq 2", "give --output-norm-freq as a list with an entry for each letter, 1 for a norm"),
        ("*-*", "--pp 2", "the 3 layers of --hybrid-layer-pattern '*-*' cannot be divided evenly among 2 stages"),
        ("*|-", "--pp 2 --pipeline-model-parallel-layout Et|tL", "leave --pipeline-model-parallel-layout Et|tL out"),
        ("*|-", "--pp 2 --num-virtual-stages-per-pipeline-rank 1", "leave --num-virtual-stages-per-pipeline-rank 1"),
        ("*|-", "--pp 2 --decoder-first-pipeline-num-layers 1", "says by | what each stage contains: leave --decoder"),
        ("--", "--cp 2 --cp-balance documents", "--cp-balance needs attention, but --hybrid-layer-pattern '--' has no"),
        ("*-", "--moe-ffn-hidden-size 8", "needs a layer with experts (E) in --hybrid-layer-pattern"),
        ("*-", "--ep 2", "--expert-model-parallel-size needs a layer with experts (E) in --hybrid-layer-pattern"),
        ("*E", "--moe-ffn-hidden-size 8", "--moe-ffn-hidden-size needs --num-experts"),
        (
            "*-",
            "--recompute-granularity full --recompute-method block --recompute-num-layers 3",
            "--recompute-num-layers 3 is more than the 2 layers of --hybrid-layer-pattern '*-'",
        ),
        ("*-", "--cpu-offloading-num-layers 2", "must be below the 2 layers of --hybrid-layer-pattern '*-': at least"),
        ("*-", "--pipeline-model-parallel-layout EtttL", "has 3 layers (t), which is not the 2 layers of --hybrid-"),
        ("*-*", "--pp 2 --decoder-first-pipeline-num-layers 3", "'*-*' less --decoder-first-pipeline-num-layers 3"),
    ],
)
def test_what_contradicts_it_is_refused(letters: str, flags: str, problem: str) -> None:
    argv = [*RUN.split(), *flags.split(), f"--hybrid-layer-pattern={letters}"]
    with pytest.raises(ConfigurationError) as raised:
        resolve(parse_arguments(argv).config, 2)
    (line,) = [line for line in str(raised.value).splitlines() if problem in line]
    assert line.isprintable()


def test_flags_of_attention_change_nothing_without_one() -> None:
    flags = "--qk-layernorm --group-query-attention --num-query-groups 2"
    without = parse_arguments([*RUN.split(), *flags.split(), "--hybrid-layer-pattern=--"])
    assert [note.partition(": changes nothing, ")[0] for note in without.notes] == [
        *("--group-query-attention", "--num-query-groups 2", "--qk-layernorm")
    ]
    assert without.notes[0].endswith("since --hybrid-layer-pattern '--' has no attention (*)")
    assert without.config.model == parse_arguments([*RUN.split(), "--hybrid-layer-pattern=--"]).config.model
    assert parse_arguments([*RUN.split(), *flags.split(), "--hybrid-layer-pattern=*-"]).config.model.qk_layernorm


@pytest.mark.parametrize(
    ("layers", "why"),
    [
        ("--hybrid-layer-pattern L-", "--hybrid-layer-pattern 'L-' has no attention (*)"),
        (
            "--num-layers 2 --experimental-attention-variant gated_delta_net --linear-attention-freq [1]*2",
            "--linear-attention-freq [1]*2 leaves no layer attention",
        ),
    ],
)
def test_no_flag_of_attention_is_silent_without_one(layers: str, why: str) -> None:
    """Heads that nothing uses need not fit either, and the network is that without the flags."""
    rotary = "--position-embedding-type yarn --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 8"
    flags = f"""--qk-layernorm --qk-layernorm-over-heads --normalization RMSNorm --softmax-type learnable
        --attention-output-gate --no-rope-freq [0,1] --attention-dropout 0.2 --kv-channels 6 {rotary}
        --cp 2 --cp-comm-type a2a"""
    of_network = "--cp 2 --normalization RMSNorm --position-embedding-type yarn"
    plain = [*RUN.split(), *layers.split(), *of_network.split()]
    parsed = parse_arguments([*RUN.split(), "--num-attention-heads", "5", *layers.split(), *flags.split()])
    notes = [note for note in parsed.notes if "changes nothing" in note]
    assert len(notes) == 10
    assert all(note.endswith(f"changes nothing, since {why}") for note in notes)
    resolve(parsed.config, 2)
    check_same_function("it", parsed.config.model, parse_arguments(plain).config.model)
    with_flags = replace(parse_arguments(plain).config.model, kv_channels=6, softmax_type="learnable")
    check_same_function("it", with_flags, parsed.config.model)  # saved before they were turned off
    with pytest.raises(ConfigurationError, match="--cp-balance needs attention, but --"):
        resolve(parse_arguments([*plain, "--cp-balance", "documents"]).config, 2)


def test_a_programs_layer_may_read_the_flags_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LETTERS, "x", Letter(LayerSpec("another", None), "another"))
    parsed = parse_arguments([*RUN.split(), "--hybrid-layer-pattern", "x-", "--kv-channels", "6", "--qk-layernorm"])
    assert (parsed.config.model.kv_channels, parsed.config.model.qk_layernorm) == (6, True)


@pytest.mark.parametrize(
    ("letters", "flags", "idle"),
    [
        ("L-", "", True),
        ("LE", "--num-experts 2 --recompute-modules core_attn moe_act", True),
        ("LE", "--num-experts 2 --recompute-modules moe", False),
        ("*-", "", False),
        ("K-", "", False),
    ],
)
def test_recomputation_of_cores_needs_one(letters: str, flags: str, idle: bool) -> None:
    selective = f"--hybrid-layer-pattern {letters} --recompute-granularity selective {flags}"
    parsed = parse_arguments([*RUN.split(), *selective.split()])
    assert (
        any("selective: changes nothing, since no layer is attention, Mamba-2 or a" in note for note in parsed.notes)
        == idle
    )
    assert (parsed.config.training.recompute_granularity is None) == idle


@pytest.mark.parametrize(("letters", "idle"), [("M-", True), ("LE", True), ("M-*", False), ("G", False), ("K", False)])
def test_matrices_of_heads_need_heads(letters: str, idle: bool) -> None:
    flags = f"--hybrid-layer-pattern {letters} --num-experts 2 --optimizer muon --muon-split-qkv-per-head"
    parsed = parse_arguments([*RUN.split(), *flags.split()])
    why = "--muon-split-qkv-per-head: changes nothing, since no layer has queries, keys and values"
    assert (why in parsed.notes) == idle
    assert parsed.config.optimizer.muon_split_qkv_per_head != idle


SPEC = "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec"


@pytest.mark.parametrize(
    "spec", [SPEC, "--spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec", f"--is-hybrid-model {SPEC}"]
)
def test_megatrons_program_for_patterns_takes_its_spec(spec: str) -> None:
    argv = [*RUN.split(), "--hybrid-override-pattern", "*-"]
    with_spec = parse_arguments([*argv, *spec.split()], hybrid=True)
    assert with_spec.config == parse_arguments(argv).config
    assert all("already so" in note for note in with_spec.notes)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--hybrid-layer-pattern *-", f"missing: {SPEC} (--help all describes all flags)"),
        (f"{SPEC} --num-layers 2", "missing: --hybrid-layer-pattern (--help all describes all flags)"),
        ("", f"missing: --hybrid-layer-pattern, {SPEC} (--help all describes all flags)"),
        (
            f"{SPEC[:-17]} gdp_stack_spec",
            "--spec gdp_stack_spec makes M a gated delta product, which megalite does not",
        ),
        (f"{SPEC[:-17]} hybrid_inference_stack_spec", "--spec hybrid_inference_stack_spec is for an inference server"),
        ("--spec my.layers spec", "--spec my.layers spec: is not supported: the layers follow from the flags"),
        ("--spec", "--spec needs a value: megatron.core.models.hybrid.hybrid_layer_specs or hybrid_stack_spec or"),
        (f"{SPEC} --hybrid-attention-ratio 0.1", "--hybrid-attention-ratio was removed, use --hybrid-layer-pattern"),
        (f"{SPEC} --mtp-hybrid-override-pattern *", "missing: --hybrid-layer-pattern"),
    ],
)
def test_megatrons_program_for_patterns_says_what_it_lacks(flags: str, problem: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        parse_arguments([*RUN.split(), *flags.split()], hybrid=True)
    assert any(line.startswith(problem) for line in str(raised.value).splitlines()), raised.value


def test_each_kind_has_a_letter_costs_and_a_module_and_flags_of_its_own() -> None:
    assert {letter.kind for letter in LETTERS.values()} <= KINDS.keys() & LAYER_KINDS.keys()
    flags = [name for kind in KINDS.values() if kind.flags for name in named(PLAIN, kind.flags)]
    assert len(flags) == len(set(flags)) > 20
    assert all(named(PLAIN, pattern) for kind in KINDS.values() for pattern in kind.flags.split())


def test_halves_have_the_names_of_a_gpts_blocks() -> None:
    """Megatron-LM's rule: the n-th attention is that of block n, and so is the n-th feed-forward layer."""
    layers = [LETTERS[letter].layer for letter in "**--E*"]
    assert numbers_in_names(layers) == ((0, None), (1, None), (None, 0), (None, 1), (None, 2), (2, None))
    assert numbers_in_names(PLAIN.layers) == ((0, 0), (1, 1))


def test_initial_weights_are_those_of_the_rule() -> None:
    network = GPT(pattern("**--*"), ParallelMesh(), dtype=torch.float64)
    for parameter in unique_parameters(network):
        set_initial_values(parameter, 3)
    expected = Network(5, 16, 4, 4, 4, 64, 30, 0.02, positions=8, pattern="**--*").weights(3, torch.float64)
    found = {piece.tensor.name: piece for _, piece in named_pieces(network)}
    assert found.keys() == expected.keys()
    for parameter, piece in named_pieces(network):
        if piece.tensor.name != "embedding.word":  # padded
            assert torch.equal(piece.view(parameter.detach()), expected[piece.tensor.name])


def test_a_pattern_of_blocks_is_a_gpt() -> None:
    assert as_gpt(pattern("*-*-")) == PLAIN
    experts = {"num_experts": 4, "window_size": "3,0"}
    gpt = as_gpt(pattern("*-*E", **experts, window_attn_skip_freq="[1,0,0,0]"))
    same = replace(PLAIN, **experts, moe_layer_freq="[0,1]", window_attn_skip_freq="[1,0]")  # type: ignore[arg-type]
    assert gpt.layers == same.layers
    assert (
        function_of(gpt)
        == function_of(same)
        == function_of(pattern("*-*E", **experts, window_attn_skip_freq="[1,0,0,0]"))
    )
    rotated = {"position_embedding_type": "rope", "no_rope_freq": "[0,0,1,0]"}
    assert [layer.rotary for layer in as_gpt(pattern("*-*-", **rotated)).layers] == [True, False]
    assert gpt.output_init_std == same.output_init_std == pattern("*-*E", **experts).output_init_std
    for other in ("**--", "-*-*", "*-*"):
        assert as_gpt(pattern(other)).hybrid_layer_pattern == other


def test_a_gpts_checkpoint_is_one_of_patterns_with_as_many_halves() -> None:
    for letters in ("*-*-", "**--", "-*-*"):
        check_same_function("it", PLAIN, pattern(letters))
    check_same_function("it", pattern("*-*-"), PLAIN)
    check_same_function("it", pattern("*-*-"), pattern("**--"))  # it is that of a GPT
    for letters in ("**--", "-*-*"):
        with pytest.raises(CheckpointError, match="hybrid_layer_pattern"):
            check_same_function("it", pattern(letters), PLAIN)
    for one, other in (("**--", "-*-*"), ("**--", "*-*-"), ("*-", "*-*")):
        with pytest.raises(CheckpointError, match="hybrid_layer_pattern"):
            check_same_function("it", pattern(one), pattern(other))
    for letters in ("*-*", "*--", "*-*-*-"):
        with pytest.raises(CheckpointError, match=r"hybrid_layer_pattern: \*-\*- in the checkpoint"):
            check_same_function("it", PLAIN, pattern(letters))


def test_the_chunks_of_a_recurrence_are_not_its_function() -> None:
    names = [field.name for field in fields(ModelConfig) if field.name.endswith("_chunk_size")]
    assert len(names) >= 3
    for name in names:
        check_same_function("it", pattern("M*-GK"), replace(pattern("M*-GK"), **{name: 16}))


def test_a_gpt_with_linear_attention_is_a_pattern() -> None:
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 4}
    variant = {"experimental_attention_variant": "gated_delta_net"}
    blocks = replace(PLAIN, num_layers=3, **variant, linear_attention_freq="3", **sizes)  # type: ignore[arg-type]
    halves = pattern("G-G-*-", **sizes)
    assert pattern_of(blocks.layers) == "G-G-*-"
    assert blocks.numbers == ((0, 0), (1, 1), (0, 2))
    assert logical_tensors(blocks) == logical_tensors(halves)
    assert blocks.output_init_std == halves.output_init_std
    check_same_function("it", blocks, halves)
    check_same_function("it", halves, blocks)
    listed = replace(blocks, linear_attention_freq="[1]*2+[0]")
    assert listed.layers == blocks.layers
    for other in (replace(blocks, linear_attention_freq="[0,1,1]"), replace(PLAIN, num_layers=3)):
        with pytest.raises(
            CheckpointError, match=r"hybrid_layer_pattern: G-G-\*- in this run|G-G-\*- in the checkpoint"
        ):
            check_same_function("it", blocks, other)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--experimental-attention-variant gdn", "gated_delta_net needs --linear-attention-freq, for the layers that"),
        ("--linear-attention-freq 2", "--linear-attention-freq needs --experimental-attention-variant gated_delta_net"),
        ("--experimental-attention-variant dsa", "--experimental-attention-variant dsa needs --multi-latent-attention"),
        ("--experimental-attention-variant gdn2", "--experimental-attention-variant gdn2 is not supported"),
        (
            "--experimental-attention-variant gdn --linear-attention-freq [1]",
            "'[1]' is for 1 layers, and the network has 2",
        ),
        (
            "--experimental-attention-variant gdn --linear-attention-freq x",
            "expected N, for attention in one layer of N",
        ),
        ("--linear-num-key-heads 2", "--linear-num-key-heads needs a gated delta net, G in --hybrid-layer-pattern"),
        *(
            (
                f"--experimental-attention-variant gdn --linear-attention-freq {freq} --linear-chunk-size 8",
                f"--linear-chunk-size needs a gated delta net, but --linear-attention-freq {freq} leaves all layers at",
            )
            for freq in ("1", "[0,0]")
        ),
    ],
)
def test_wrong_flags_of_linear_attention_are_refused(flags: str, problem: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        resolve(parse_arguments([*RUN.split(), "--num-layers", "2", *flags.split()]).config, 1)
    assert problem in str(raised.value)


def test_norms_of_queries_and_keys_decay_where_asked() -> None:
    for decays in (True, False):
        model = parse_arguments(
            [*RUN.split(), "--num-layers=2", "--qk-layernorm", *["--apply-wd-to-qk-layernorm"] * decays]
        )
        weights = tensors_of_training(model.config.model)
        assert {
            name.split(".", 2)[-1] for name, weight in weights.items() if weight.weight_decay and "norm" in name
        } == {f"attention.{part}_norm.{kind}" for part in ("query", "key") for kind in ("weight", "bias") if decays}
    idle = parse_arguments([*RUN.split(), "--num-layers=2", "--no-weight-decay-cond-type", "apply_wd_to_qk_layernorm"])
    assert "--apply-wd-to-qk-layernorm: changes nothing without --qk-layernorm" in idle.notes
    assert not idle.config.model.apply_wd_to_qk_layernorm


def test_a_pattern_has_linear_attention_by_its_letters() -> None:
    flags = "--hybrid-layer-pattern G- --experimental-attention-variant gated_delta_net --linear-attention-freq 3"
    parsed = parse_arguments([*RUN.split(), *flags.split()])
    assert parsed.config.model.experimental_attention_variant is None
    assert sum("changes nothing, since --hybrid-layer-pattern has all layers" in note for note in parsed.notes) == 2


def test_another_mixer_is_not_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LETTERS, "M", Letter(LayerSpec("another", None), "another"))
    other = pattern("M-M-", window_size="3,0", window_attn_skip_freq="[1,1,1,1]")
    assert as_gpt(other) == as_gpt(other, in_any_order=True) == other
    assert [layer.keys_before for layer in other.layers] == [None] * 4
    with pytest.raises(CheckpointError, match="hybrid_layer_pattern"):
        check_same_function("it", PLAIN, pattern("M-M-"))


def test_other_formats_have_no_other_patterns() -> None:
    with pytest.raises(CheckpointError, match=r"no family of Hugging Face has .*--hybrid-layer-pattern \*\*--"):
        choose(FAMILIES, pattern("**--"))


def test_operations_are_those_of_the_halves() -> None:
    layers = {letters: flops_per_token(pattern(letters), 0, 8) for letters in ("*", "-", "**-", "*-*-")}
    assert layers["**-"] == 2 * layers["*"] + layers["-"]
    assert layers["*-*-"] == flops_per_token(PLAIN, 0, 8) > 0


@torch.no_grad()
def test_generation_caches_each_attention() -> None:
    """Token by token, with a cache, as all at once."""
    network = make_network(pattern("-**-*"), ParallelMesh(), torch.float64)
    for parameter in unique_parameters(network.stage):
        set_initial_values(parameter, seed=1)
    tokens = torch.arange(6)[None] * 5 % 30
    cache = StageCache(8)
    found = [network.run(tokens[:, [at]], torch.tensor([[at]]), cache) for at in range(6)]
    assert network.stage.head is not None
    one_by_one = torch.cat([network.stage.head(hidden) for hidden in found]).transpose(0, 1)
    torch.testing.assert_close(one_by_one[..., :30], logits(network, tokens), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("letter", "name", "problem"),
    [
        ("M", "mine", "'M'.*give a letter from a to z or A to Z that is free"),
        ("D", "mine", "'D'.*that is free"),
        ("|", "mine", "that is free"),
        ("xy", "mine", "that is free"),
        ("x", "mamba", "'mamba'.*give another word"),
        ("x", "mlp", "give another word"),
        ("x", "two words", "give another word"),
    ],
)
def test_a_programs_letter_takes_no_others_place(letter: str, name: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        megalite.register_layer(letter, name, lambda *_: nn.Identity(), weights=lambda _: 0, products=lambda *_: 0.0)


def test_a_program_s_pattern_may_say_its_stages() -> None:
    model = pattern("*|-*-", num_layers=4)
    plain = resolve(parse_arguments([*RUN.split(), "--pp", "2", "--num-layers", "2"]).config, 2)
    sections = {each.name: getattr(plain, each.name) for each in fields(plain)} | {"model": model}
    config = configured(sections, {}, None, 2)
    assert isinstance(config, RunConfig)
    assert config.model.hybrid_layer_pattern == "*-*-"
    assert [stage.layers for stage in stage_layers(config.model, config.parallel)] == [1, 3]
