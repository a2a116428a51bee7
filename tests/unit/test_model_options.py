"""The page on the options of the network: what it names is there, and what is there it names."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from megalite.config.model import ModelConfig

PAGE = (Path(__file__).parents[2] / "docs" / "model.md").read_text()
OF_ANY_FAMILY = """num_layers hidden_size num_attention_heads ffn_hidden_size vocab_size make_vocab_size_divisible_by
    hidden_dropout attention_dropout"""


def test_the_table_names_every_option_and_no_other() -> None:
    named = set(re.findall(r"`([a-z0-9_]+)`", PAGE))
    assert named == {field.name for field in fields(ModelConfig)} - set(OF_ANY_FAMILY.split())
