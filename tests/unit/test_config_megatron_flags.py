"""Every option of Megatron-LM has exactly one fate here, and what is accepted changes what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args, get_origin

import pytest

from megalite.config import RunConfig, megatron_flags, parse_arguments
from megalite.config.run import fields_by_name
from megalite.errors import ConfigurationError

TABLES = megatron_flags.tables()
MINIMAL = [
    *("--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "4"),
    *("--seq-length", "8", "--micro-batch-size", "1", "--lr", "0.1"),
]


def megatron_options() -> list[tuple[list[str], str]]:
    """Return names (without dashes, with hyphens) and number of values of each option of Megatron-LM."""
    lines = (Path(__file__).parent / "megatron_flags.txt").read_text().splitlines()
    rows = (line.split() for line in lines if line.startswith("--"))
    return [([name[2:].replace("_", "-") for name in names], arity) for *names, arity in rows]


ARITY = {name: arity for names, arity in megatron_options() for name in names}


def values_for(arity: str, value: str = "1") -> list[str]:
    return {"0": [], "1": [value], "3": [value] * 3}.get(arity, [value, value])


def field_flags() -> set[str]:
    places = fields_by_name()
    flags = {name.replace("_", "-") for name in places}
    return flags | {"no-" + name.replace("_", "-") for name, place in places.items() if place.kind is bool}


def value_of(config: RunConfig, name: str) -> Any:
    return getattr(getattr(config, fields_by_name()[name].section), name)


def test_the_list_is_whole() -> None:
    assert len(megatron_options()) == 838 + 87 + 19  # and those of earlier releases, forks, and Model Optimizer


def test_every_option_has_exactly_one_fate() -> None:
    fates = [*field_flags(), *megatron_flags.names()]
    assert sorted(name for name in ARITY if fates.count(name) != 1) == []
    assert len(fates) == len(set(fates))


def test_the_tables_name_no_flag_that_megatron_lacks() -> None:
    assert set(megatron_flags.names()) - set(ARITY) == {
        *("tp", "pp", "cp", "ep", "etp"),
        "check-for-nan-in-loss-and-grad",  # Megatron-LM has its negation alone, and the field
    }


def test_fields_take_as_many_values_as_their_options() -> None:
    for name, place in fields_by_name().items():
        flag = name.replace("_", "-")
        if flag in ARITY:
            if name == "step_batch_size_schedule":
                continue  # one text with spaces there, which shells often split
            three = tuple[int, int, int] in get_args(place.kind)
            expected = "0" if place.kind is bool else "*" if get_origin(place.kind) is tuple else "3" if three else "1"
            assert (flag, ARITY[flag].replace("+", "*")) == (flag, expected)


@pytest.mark.parametrize(("table", "effect"), megatron_flags.ACCEPTED.items())
def test_what_is_already_so_or_changes_nothing_is_accepted_with_its_values_and_noted(table: str, effect: str) -> None:
    plain = parse_arguments([*MINIMAL, "--swiglu"]).config
    entries = [entry.partition("=") for entries in TABLES[table].values() for entry in entries.split()]
    for flag, _, count in entries:
        parsed = parse_arguments([*MINIMAL, f"--{flag}", *values_for(ARITY[flag]), "--swiglu"])
        assert parsed.config == plain, flag
        assert len(parsed.notes) == 1
        assert parsed.notes[0].startswith(f"--{flag}: {effect}, ")
        if count == "*":
            continue
        with pytest.raises(ConfigurationError, match=f"--{flag} takes"):
            parse_arguments([*MINIMAL, f"--{flag}", *values_for(ARITY[flag]), "1"])
        if count == "1":
            with pytest.raises(ConfigurationError, match=f"--{flag} takes a whole number, got 'banana'"):
                parse_arguments([*MINIMAL, f"--{flag}", "banana"])


@pytest.mark.parametrize("flag", TABLES["accepted_values"])
def test_flags_bound_to_some_values_take_those_alone(flag: str) -> None:
    row = TABLES["accepted_values"][flag]
    for value in row["values"].split():
        assert parse_arguments([*MINIMAL, f"--{flag}={value}"]).notes == (f"--{flag} {value}: already so",)
    with pytest.raises(ConfigurationError) as refused:
        parse_arguments([*MINIMAL, f"--{flag}", "7"])
    assert str(refused.value).startswith(f"--{flag} 7: {megatron_flags.reason(row['why'])}; ")
    with pytest.raises(ConfigurationError, match="needs a value"):
        parse_arguments([*MINIMAL, f"--{flag}"])


def test_values_that_stand_for_another_flag() -> None:
    saving = [*MINIMAL, "--save", "s", "--qk-layernorm"]  # for flags of these norms
    for flag, values in TABLES["value_shorthands"].items():
        for value, meant in values.items():
            one_layer = ["--recompute-num-layers", "1"] if flag == "activations-checkpoint-method" else []
            found = parse_arguments([*saving, f"--{flag}", value]).config
            assert found == parse_arguments([*saving, *meant.split(), *one_layer]).config
            other = ["--ckpt-format", "torch_dist"] if meant == "--ckpt-format megalite" else []
            assert found != parse_arguments([*saving, *other]).config
    with pytest.raises(ConfigurationError, match=r"te: needs Transformer Engine, .*; it takes native or linear"):
        parse_arguments([*MINIMAL, "--cross-entropy-fusion-impl", "te"])
    with pytest.raises(ConfigurationError, match=r"some: is not one .*; it takes uniform or block"):
        parse_arguments([*MINIMAL, "--activations-checkpoint-method", "some"])


def test_every_refused_option_says_why_and_all_are_named_at_once() -> None:
    refused = {flag: row["why"] for row in TABLES["refused"].values() for flag in row["flags"].split()}
    refused |= {flag: f"was removed, use {use}" for flag, use in TABLES["removed"].items()}
    refused |= {flag: f"is of a fork of Megatron-LM, use {use}" for flag, use in TABLES["forks"].items()}
    argv = [token for flag in refused for token in (f"--{flag}", *values_for(ARITY[flag]))]
    with pytest.raises(ConfigurationError) as raised:
        parse_arguments([*MINIMAL, *argv])
    assert str(raised.value).splitlines() == [f"--{flag} {reason}" for flag, reason in refused.items()]


def test_what_a_removed_flag_points_to_exists() -> None:
    known = {*field_flags(), *megatron_flags.names(), "config"}
    assert {
        use.split()[0].removeprefix("--").rstrip(",")
        for use in (*TABLES["removed"].values(), *TABLES["forks"].values())
    } <= known


def test_values_of_megatron_that_a_field_refuses_say_why() -> None:
    for flag, reasons in TABLES["refused_values"].items():
        for value, reason in reasons.items():
            with pytest.raises(ConfigurationError) as raised:
                parse_arguments([*MINIMAL, f"--{flag}", value])
            assert str(raised.value) == f"--{flag} {value} {megatron_flags.reason(reason)}"


@pytest.mark.parametrize(
    ("flag", "field", "value"),
    [
        ("--disable-bias-linear", "add_bias_linear", False),
        ("--no-save-optim", "save_optim", False),
        ("--no-load-optim", "load_optim", False),
        ("--use-custom-fsdp", "data_parallel_sharding_strategy", "optim_grads_params"),
        ("--use-torch-fsdp2", "data_parallel_sharding_strategy", "optim_grads_params"),
        ("--use-megatron-fsdp", "data_parallel_sharding_strategy", "optim_grads_params"),
        ("--no-mmap-bin-files", "mmap_bin_files", False),
        ("--no-manual-gc-eval", "manual_gc_eval", False),
        ("--muon-no-split-qkv", "muon_split_qkv", False),
        ("--no-dsa-indexer-scoring-relu", "dsa_indexer_scoring_relu", False),
        ("--disable-dsa-indexer-scoring-relu", "dsa_indexer_scoring_relu", False),
        ("--disable-manual-gc-eval", "manual_gc_eval", False),
        ("--no-fp8-wgrad", "fp8_wgrad", False),
        ("--disable-fp8-wgrad", "fp8_wgrad", False),
        ("--fp8-e4m3", "fp8_format", "e4m3"),
        ("--fp8-hybrid", "fp8_format", "hybrid"),
        ("--no-log-loss-scale-to-tensorboard", "log_loss_scale_to_tensorboard", False),
        ("--disable-log-loss-scale-to-tensorboard", "log_loss_scale_to_tensorboard", False),
        ("--no-align-grad-reduce", "align_grad_reduce", False),
        ("--disable-align-grad-reduce", "align_grad_reduce", False),
        ("--no-overlap-p2p-communication", "overlap_p2p_communication", False),
        ("--no-position-embedding", "position_embedding_type", "none"),
        ("--no-bias-gelu-fusion", "exact_gelu", True),
        ("--no-bias-swiglu-fusion", "bias_swiglu_fusion", False),
        ("--no-bias-dropout-fusion", "bias_dropout_fusion", False),
        ("--no-rope-fusion", "rope_fusion", False),
        ("--no-persist-layer-norm", "persist_layer_norm", False),
        ("--use-rotary-position-embeddings", "position_embedding_type", "rope"),
        ("--no-yarn-correction-range-round-to-int", "yarn_correction_range_round_to_int", False),
        ("--recompute-activations", "recompute_granularity", "selective"),
        ("--dataloader-inter-document-masking", "reset_attention_mask", True),
        ("--dataloader-inter-document-masking", "reset_position_ids", True),
        ("--checkpoint-activations", "recompute_method", "uniform"),
        ("--checkpoint-activations", "recompute_num_layers", 1),
        ("--no-delay-grad-reduce", "align_grad_reduce", False),
        ("--check-for-nan-in-loss-and-grad", "on_not_finite", "end"),
        ("--no-pin-cpu-grads", "pin_cpu_grads", False),
        ("--no-pin-cpu-params", "pin_cpu_params", False),
    ],
)
def test_flags_of_another_sense_or_spelling_change_their_field(flag: str, field: str, value: object) -> None:
    # Where there is nothing to steer, what steers it is idle.
    pipeline = [*MINIMAL, "--pp", "2", "--num-virtual-stages-per-pipeline-rank", "2", "--overlap-grad-reduce"]
    pipeline += ["--fp8-wgrad"] if "wgrad" in flag else []  # off unless it is given, unlike in Megatron-LM
    before, after = parse_arguments(pipeline).config, parse_arguments([*pipeline, flag]).config
    assert value_of(before, field) != value
    assert value_of(after, field) == value


def test_every_flag_of_another_sense_or_spelling_is_in_the_test_above() -> None:
    tested = {case[0] for case in test_flags_of_another_sense_or_spelling_change_their_field.pytestmark[0].args[1]}
    negatives = {name for name in ARITY if name.startswith(("no-", "disable-")) and name in field_flags()}
    negatives -= {"no-rope-freq"}  # the name of a field
    last = megatron_flags.APPLIED_LAST
    assert tested == {"--" + name for name in (*TABLES["shorthands"], *last, *negatives)}


@pytest.mark.parametrize("order", [1, -1])
def test_no_position_embedding_leaves_rotary_embeddings_alone(order: int) -> None:
    flags = [["--no-position-embedding"], ["--position-embedding-type", "rope"]][::order]
    config = parse_arguments([*MINIMAL, *flags[0], *flags[1]]).config
    assert config.model.position_embedding_type == "rope"


LATENTS = [*MINIMAL, "--multi-latent-attention", "--max-position-embeddings", "8"]


@pytest.mark.parametrize(
    ("flags", "expected", "note"),
    [
        ("--position-embedding-type rope", ("rope", 1.0), None),
        ("", ("learned_absolute", 1.0), None),
        ("--no-position-embedding", ("rope", 1.0), None),
        (
            "--position-embedding-type rope --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0",
            ("yarn", 40.0),
            "--rotary-scaling-factor 40: is --position-embedding-type yarn "
            "--yarn-original-max-position-embeddings 4096 here, for latent attention",
        ),
        (
            "--rotary-scaling-factor 40 --position-embedding-type rope --rope-type yarn "
            "--yarn-original-max-position-embeddings 64",
            ("yarn", 40.0),
            "--rotary-scaling-factor 40: is --position-embedding-type yarn --yarn-original-max-position-embeddings 64 "
            "here, for latent attention",
        ),
        (
            "--position-embedding-type rope --rotary-scaling-factor 40 --rope-type rope",
            ("rope", 1.0),
            "--rotary-scaling-factor 40: changes nothing, since --rope-type is rope",
        ),
        ("--position-embedding-type rope --rope-type rope", ("rope", 1.0), "--rope-type rope: already so"),
        (
            "--position-embedding-type rope --rotary-scaling-factor 1.0 --mscale-all-dim 1.0",
            ("rope", 1.0),
            "--mscale-all-dim 1.0: changes nothing, since --rotary-scaling-factor is 1",
        ),
        (
            "--position-embedding-type none",
            ("none", 1.0),
            "--position-embedding-type none: latent attention is not rotated, but always is in Megatron-LM "
            "(--position-embedding-type rope)",
        ),
        (
            "--position-embedding-type rope --qk-layernorm",
            ("rope", 1.0),
            "--qk-layernorm: without --q-lora-rank the latent of keys and values alone is normalised; Megatron-LM "
            "since 0.19 normalises the input of the queries, too",
        ),
        (
            "--position-embedding-type rope --use-rope-scaling",
            ("rope", 1.0),
            "--use-rope-scaling: scales the rotation of latent attention, which Megatron-LM leaves as it is",
        ),
    ],
    ids=[
        *("rope", "a table", "no table", "scaled", "scaled over 64", "scaled, but rope", "type rope", "scaled by 1"),
        *("none", "norms without a rank", "scaled as in Llama"),
    ],
)
def test_latent_attention_is_rotated_as_in_megatron(flags: str, expected: tuple[str, float], note: str | None) -> None:
    parsed = parse_arguments([*LATENTS, *flags.split()])
    model = parsed.config.model
    assert (model.position_embedding_type, model.rotary_scaling_factor) == expected
    assert model.rotary == (expected[0] != "none")
    before = parse_arguments(LATENTS).notes
    assert [each for each in parsed.notes if each not in before] == ([] if note is None else [note])


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--rotary-scaling-factor 40", "YaRN beside a table of positions is not supported"),
        (
            "--rope-type yarn --position-embedding-type none",
            "--rope-type yarn contradicts --position-embedding-type none",
        ),
        (
            "--rope-type rope --position-embedding-type yarn",
            "--rope-type rope contradicts --position-embedding-type yarn",
        ),
        (
            "--rope-type rope --position-embedding-type rope --rotary-scaling-factor 40 --mscale-all-dim 1",
            "Megatron-LM multiplies the scores as under YaRN without its rotation",
        ),
        ("--rope-type mrope", "--rope-type 'mrope': expected one of rope, yarn"),
        ("--no-multi-latent-attention --rope-type yarn", "--rope-type yarn needs latent attention"),
    ],
)
def test_rotations_of_latent_attention_that_there_are_not_are_refused(flags: str, problem: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        parse_arguments([*LATENTS, *flags.split()])
    assert problem in str(raised.value)


@pytest.mark.parametrize("other", ["--swiglu", "--squared-relu", "--openai-gelu", "--no-exact-gelu"])
def test_without_fusion_gelu_alone_is_exact(other: str) -> None:
    assert parse_arguments([*MINIMAL, "--no-bias-gelu-fusion", "--geglu"]).config.model.exact_gelu
    assert not parse_arguments([*MINIMAL, "--no-bias-gelu-fusion", other]).config.model.exact_gelu


@pytest.mark.parametrize("flag", ["--disable-bias-linear", "--no-add-bias-linear"])
def test_without_biases_plain_gelu_is_exact(flag: str) -> None:
    assert parse_arguments([*MINIMAL, flag]).config.model.exact_gelu
    for other in ("--swiglu", "--squared-relu", "--geglu", "--openai-gelu", "--no-exact-gelu"):
        assert not parse_arguments([*MINIMAL, flag, other]).config.model.exact_gelu


def test_a_file_without_biases_keeps_its_gelu(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model:\n  add_bias_linear: false\n")
    parsed = parse_arguments([*MINIMAL, "--config", str(tmp_path / "run.yaml")])
    assert not parsed.config.model.exact_gelu
    assert parsed.notes[0].startswith("GELU is in its tanh form; Megatron-LM's is exact without biases")


@pytest.mark.parametrize(
    ("alias", "field"),
    [
        ("tp", "tensor_model_parallel_size"),
        ("pp", "pipeline_model_parallel_size"),
        ("cp", "context_parallel_size"),
        ("ep", "expert_model_parallel_size"),
        ("etp", "expert_tensor_parallel_size"),
        ("encoder-num-layers", "num_layers"),
        ("encoder-seq-length", "seq_length"),
        ("persistent-save-interval", "save_interval"),
        ("model-parallel-size", "tensor_model_parallel_size"),
        ("checkpoint-num-layers", "recompute_num_layers"),
        ("layernorm-epsilon", "norm_epsilon"),
    ],
)
def test_aliases_set_their_field(alias: str, field: str) -> None:
    effective = {"etp": ["--num-experts", "2"], "checkpoint-num-layers": ["--recompute-granularity", "full"]}
    effective["persistent-save-interval"] = ["--save", "run"]
    assert value_of(parse_arguments([*MINIMAL, *effective.get(alias, []), f"--{alias}", "3"]).config, field) == 3


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_megatron_fsdp_shards_all_unless_told_otherwise(strategy: str, tmp_path: Path) -> None:
    """This is Megatron-LM's default, in any order of the flags."""
    fsdp = parse_arguments([*MINIMAL, "--use-megatron-fsdp", "--use-distributed-optimizer"]).config.parallel
    assert fsdp.zero_stage == 3
    named = ["--data-parallel-sharding-strategy", strategy]
    in_file = tmp_path / "run.yaml"
    in_file.write_text(f"parallel:\n  data_parallel_sharding_strategy: {strategy}\n")
    ways = (["--use-megatron-fsdp", *named], [*named, "--use-megatron-fsdp"])
    for flags in (*ways, ["--config", str(in_file), "--use-megatron-fsdp"]):
        assert parse_arguments([*MINIMAL, *flags]).config.parallel.data_parallel_sharding_strategy == strategy


@pytest.mark.parametrize("masks", ["--sft", "--eod-mask-loss", "--fim-data"])
def test_masked_losses_are_told_apart_from_megatrons(masks: str) -> None:
    """Megatron-LM averages the means of micro-batches, unless --calculate-per-token-loss selects our mean."""
    (note,) = parse_arguments([*MINIMAL, masks]).notes
    assert note.startswith(f"{masks}: losses are masked")
    assert "--calculate-per-token-loss" in note
    (other,) = parse_arguments([*MINIMAL, masks, "--calculate-per-token-loss"]).notes
    assert "already so" in other
    assert parse_arguments([*MINIMAL, masks, "--global-batch-size", "1"]).notes == ()


def test_many_notes_about_accepted_flags_are_one_line() -> None:
    flags = ["--cuda-graph-scope", "attn", "mlp", "--test-mode", "--use-sharp", "--te-rng-tracker"]
    assert len(parse_arguments([*MINIMAL, *flags]).notes) == 3  # two have the same reason
    (note,) = parse_arguments([*MINIMAL, *flags, "--use-mcore-models"]).notes
    assert note.startswith("5 flags change nothing here (docs/flags.md says why): --cuda-graph-scope --test-mode ")
    done = parse_arguments(
        [*MINIMAL, *flags, "--use-mcore-models", "--one-logger-project", "p", "--app-tag-run-name", "e"]
    ).notes
    assert done[0] == note
    assert done[1].startswith("--one-logger-project, --app-tag-run-name: not done, metrics go where --report-to")
    also = parse_arguments([*MINIMAL, *flags, "--use-mcore-models", "--ckpt-format", "torch", "--save", "s"]).notes
    assert also == (note, "--ckpt-format torch: is --ckpt-format megalite here")


@pytest.mark.parametrize("order", [1, -1])
def test_earlier_releases_recompute_chunks_of_layers(order: int) -> None:
    flags = [["--checkpoint-activations"], ["--checkpoint-num-layers", "3"]][::order]
    training = parse_arguments([*MINIMAL, *flags[0], *flags[1]]).config.training
    assert (training.recompute_granularity, training.recompute_num_layers) == ("full", 3)
    two = parse_arguments([*MINIMAL, "--num-layers", "4", "--activations-checkpoint-method", "block"]).config.training
    assert (two.recompute_method, two.recompute_num_layers) == ("block", 1)


def test_a_vocabulary_file_alone_is_gpt2s() -> None:
    assert parse_arguments([*MINIMAL, "--vocab-file", "v", "--merge-file", "m"]).config.data.tokenizer_type == (
        "GPT2BPETokenizer"
    )
    named = [*MINIMAL, "--vocab-file", "v", "--tokenizer-type", "NullTokenizer"]
    assert parse_arguments(named).config.data.tokenizer_type == "NullTokenizer"


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        (
            "--use-rotary-position-embeddings | --position-embedding-type learned_absolute",
            "position_embedding_type",
            "rope",
        ),
        ("--recompute-activations | --recompute-granularity full", "recompute_granularity", "selective"),
        ("--use-torch-fsdp2 | --data-parallel-sharding-strategy optim", "data_parallel_sharding_strategy", "optim"),
    ],
)
def test_the_order_of_flags_decides_nothing(order: int, flags: str, field: str, value: str) -> None:
    argv = [word for flag in flags.split(" | ")[::order] for word in flag.split()]
    assert value_of(parse_arguments([*MINIMAL, *argv]).config, field) == value


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--fp8-e4m3 --fp8-format hybrid", "--fp8-format: changes nothing, since --fp8-e4m3 decides"),
        ("--fp8-wgrad --disable-fp8-wgrad", "--fp8-wgrad: changes nothing, since --disable-fp8-wgrad decides"),
        ("--fp8-e4m3 --fp8-format e4m3", None),
        ("--fp8-e4m3 --fp8-hybrid", "--fp8-e4m3: changes nothing, since --fp8-hybrid comes after it"),
    ],
)
def test_a_shorthand_that_decides_against_a_flag_is_told(flags: str, told: str | None) -> None:
    notes = parse_arguments([*MINIMAL, *flags.split()]).notes
    assert [note for note in notes if "fp8" in note] == ([told] if told else [])


def test_documents_are_not_masked_where_megatron_builds_no_mask() -> None:
    flags = [*MINIMAL, "--no-create-attention-mask-in-dataloader"]
    parsed = parse_arguments([*flags, "--reset-attention-mask"])
    assert not parsed.config.data.reset_attention_mask
    assert any(note.startswith("--reset-attention-mask: changes nothing, since") for note in parsed.notes)
    assert parse_arguments([*flags, "--dataloader-inter-document-masking"]).config.data.reset_attention_mask
