"""A configuration written as YAML is read back equal; what does not fit is named with its line."""

from __future__ import annotations

import types
from dataclasses import replace
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.config import CheckpointConfig, RunConfig, dump, load_yaml, yaml_file
from megalite.config.run import section_types
from megalite.errors import ConfigurationError

VALID = """\
model:
  num_layers: 2
  hidden_size: 16
  num_attention_heads: 4
data:
  seq_length: 8
optimizer:
  lr: 1e-3
training:
  micro_batch_size: 1
"""


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for any value of a field of this type."""
    origin, options = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return st.none() | values(options[0])
    if origin is Literal:
        return st.sampled_from(options)
    if origin is tuple:
        return st.lists(values(options[0])).map(tuple) if Ellipsis in options else st.tuples(*map(values, options))
    return {
        int: st.integers(),
        float: st.floats(allow_nan=False),
        bool: st.booleans(),
        str: st.text().filter(str.strip),
    }[kind]


def configs() -> st.SearchStrategy[RunConfig]:
    sections = {
        name: st.builds(kind, **{field: values(hint) for field, hint in get_type_hints(kind).items()})
        for name, kind in section_types().items()
    }
    return st.builds(RunConfig, **sections)


def test_the_file_of_a_run_that_knew_fewer_axes_is_read() -> None:
    config = load_yaml(VALID)
    lines = dump(config).splitlines(keepends=True)
    names = ("context_parallel", " cp_", "- p2p", "expert_model_parallel", "expert_tensor_parallel")
    older = "".join(line for line in lines if not any(name in line for name in names))
    assert len(older.splitlines()) == len(lines) - 9
    assert load_yaml(older) == config


@settings(deadline=None, max_examples=8)
@given(configs())
def test_any_configuration_comes_back_equal(config: RunConfig) -> None:
    assert load_yaml(dump(config)) == config


@pytest.mark.wide
@settings(deadline=None, max_examples=50)
@given(configs())
def test_many_configurations_come_back_equal(config: RunConfig) -> None:
    assert load_yaml(dump(config)) == config


def test_texts_that_yaml_would_read_as_something_else_stay_texts() -> None:
    for text in ("1e-4", "no", "null", "~", "969, 30, 1", "2024-01-01", "0x10", "a: b", "Größe \u2028\x85"):
        config = replace(load_yaml(VALID), checkpoint=CheckpointConfig(save=text))
        assert load_yaml(dump(config)) == config


def test_what_is_left_out_has_its_default_and_numbers_may_be_written_in_any_way() -> None:
    config = load_yaml(VALID + "logging:\nparallel: {}\n")
    assert (config.optimizer.lr, config.logging.log_interval, config.model.norm_epsilon) == (1e-3, 100, 1e-5)
    assert load_yaml(VALID.replace("1e-3", "1")).optimizer.lr == 1.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modle: {}", "line 11: unknown section 'modle', did you mean model?"),
        ("logging:\n  log_intervall: 3", "line 12: unknown key 'log_intervall', did you mean log_interval?"),
        ("logging:\n  lr: 3", "line 12: lr belongs under optimizer, not logging"),
        ("logging:\n  mask_prob: 1", "line 12: mask_prob is not for pre-training a GPT"),
        ("logging:\n  log_interval: 3\n  log_interval: 4", "line 13: log_interval is given twice"),
        ("logging:\n  log_interval: soon", "line 12: log_interval: expected a whole number, got 'soon'"),
        ("logging:\n  metrics_path: ''", "line 12: metrics_path: '' is blank: if this was a shell variable"),
        ("data:\n  data_path: [a, ' ']", "line 12: data_path: ' ' is blank"),
        ("data:\n  fim_no_prefix: ''", "line 12: fim_no_prefix: '' is blank"),
        ("logging:\n  log_interval: 2.5", "line 12: log_interval: expected a whole number, got 2.5"),
        ("logging:\n  log_interval: true", "line 12: log_interval: expected a whole number, got True"),
        ("logging:\n  log_interval:", "line 12: log_interval: expected a whole number, got None"),
        ("logging:\n  metrics_path: 3", "line 12: metrics_path: expected a text (in quotes), got 3"),
        ("parallel:\n  sequence_parallel: 1", "line 12: sequence_parallel: expected true or false, got 1"),
        (
            "parallel:\n  distributed_backend: mpi",
            "line 12: distributed_backend: expected one of nccl, gloo, got 'mpi'",
        ),
        ("logging: 3", "line 11: expected the fields of logging as `name: value` lines"),
        ("data:\n  data_path: a", "line 12: data_path: expected a list of texts (numbers in quotes), got 'a'"),
        ("data:\n  data_path: [0.5, a]", "line 12: data_path: expected a list of texts (numbers in quotes), got [0.5"),
        (
            "profiling:\n  profile_ranks: [0, a]",
            "line 12: profile_ranks: expected a list of whole numbers, got",
        ),
        ("optimizer:\n  min_lr: small", "line 12: min_lr: expected a finite number, got 'small'"),
        ("optimizer:\n  min_lr: 1e400", "line 12: min_lr: expected a finite number, got '1e400'"),
        ("optimizer:\n  min_lr: [1]", "line 12: min_lr: expected a number, got [1]"),
        (
            "optimizer:\n  optimizer: soap",
            "lion, adafactor, got 'soap' (is not supported: ",
        ),
        ("optimizer: [", "not YAML"),
        ("logging:\n  metrics_path: !!python/name:os.system ''", "not YAML"),
    ],
)
def test_what_does_not_fit_is_named_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        load_yaml(VALID + text, "run.yaml")
    assert str(raised.value).startswith("run.yaml")
    assert message in str(raised.value)
    assert "None" not in str(raised.value).replace("got None", "")


def test_a_file_that_is_no_mapping_or_lacks_fields_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="line 1: expected sections"):
        load_yaml("- a")
    with pytest.raises(ConfigurationError, match=r"run.yaml: missing num_layers, .*micro_batch_size"):
        load_yaml("", "run.yaml")


LAUGHS = "laughs:\n" + "\n".join(f"- &l{n} [{', '.join([f'*l{n - 1}'] * 9) if n else 'ha'}]" for n in range(10))


@pytest.mark.wide
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("checkpoint:\n  save: 2001-99-99", "line 12: save: '2001-99-99' is not of type timestamp (put text in"),
        ("checkpoint:\n  save: 2001-01-01", "line 12: save: expected a text (in quotes), got datetime.date(2001"),
        ("checkpoint:\n  save: 2001-01-01T25:61:61", "line 12: save: '2001-01-01T25:61:61' is not of type timestamp"),
        *((f"logging:\n  log_interval: !!{kind} {text}", f"log_interval: {text or repr('')} is not of type {kind}")
          for kind, text in [("int", "'abc'"), ("int", ""), ("float", "'abc'"), ("bool", "'abc'")]),
        ("logging:\n  log_interval: " + "9" * 5000, "is not of type int (put text in quotes)"),
        ("logging:\n  log_interval: 1" + ":1" * 100_000, "is not of type int (put text in quotes)"),
        ("logging:\n  metrics_path: {a: {b: 1}}", "line 12: metrics_path: expected one value, or a list of values"),
        ("data:\n  data_path: [[a], [b]]", "line 12: data_path: expected one value, or a list of values"),
        ("logging: " + "{a: " * 2000, "lists in lists, too deep"),
        ("logging:\n  metrics_path: " + "[" * 5000, "lists in lists, too deep"),
        ("checkpoint:\n  save: *l9", "line 23: save: expected one value, or a list of values"),
        ("checkpoint:\n  ? *l9\n  : 1", "line 21: expected the fields of checkpoint"),
        ("logging:\n  <<: {log_interval: 1}", "line 12: unknown key '<<'"),
        ("data:\n  data_path: [" + "a," * 30_000 + "]", "more than 25000 entries"),
        ("logging: !!python/name:os.system", "line 11: expected the fields of logging as"),
        ("logging: !!python/object:os.system {}", "line 11: expected the fields of logging as"),
        ("logging:\n  metrics_path: a\0b", "not YAML"),
        ("x" * 1000 + ": 1", "unknown section 'xxx"),
        ("logging:\n  log_interval: " + "x" * 100_000, "log_interval: expected a whole number, got 'xxx"),
        ("logging:\n  tensorboard_dir: *nowhere" + "x" * 100_000, "not YAML"),
        ("logging:\n" + "".join(f"  x{n}: 1\n" for n in range(1000)), "... and 992 more"),
    ],
)  # fmt: skip
def test_nothing_makes_reading_long_or_a_message_large(text: str, message: str) -> None:
    if "*l9" in text:
        text = text.replace("checkpoint:", f"{LAUGHS}\ncheckpoint:")
    with pytest.raises(ConfigurationError) as raised:
        load_yaml(VALID + text, "run.yaml")
    assert message in str(raised.value)
    assert max(map(len, str(raised.value).splitlines())) < 400
    assert len(str(raised.value).splitlines()) <= 32


def test_no_more_is_suggested_than_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def matches(name: str, *_: object, **__: object) -> list[str]:
        asked.append(name)
        return []

    monkeypatch.setattr(yaml_file, "get_close_matches", matches)
    for text in ("model:\n" + "".join(f"  k{n}: 1\n" for n in range(2000)), "".join(f"k{n}: 1\n" for n in range(2000))):
        asked.clear()
        with pytest.raises(ConfigurationError, match="and 1992 more"):
            load_yaml(text)
        assert len(asked) == 8
