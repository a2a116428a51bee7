"""docs/flags.md says what the dataclasses say."""

from __future__ import annotations

import re
from pathlib import Path

from megalite.config import megatron_flags
from megalite.config.flags_page import page
from megalite.config.run import fields_by_name

PAGE = Path(__file__).parents[2] / "docs" / "flags.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run: python -m megalite.config.flags_page > docs/flags.md"


def test_every_flag_and_every_other_spelling_is_on_it() -> None:
    shown = set(re.findall(r"`--([A-Za-z0-9-]+)", page()))
    flags = {name.replace("_", "-") for name in fields_by_name()}
    others = set(megatron_flags.names()) - {name for name in megatron_flags.names() if megatron_flags.refusal(name)}
    assert flags | others <= shown


def test_a_row_has_value_default_and_other_spellings() -> None:
    assert "| `--tensor-model-parallel-size` | whole number | `1` | Ranks that share each layer's matrices" in page()
    assert "Also `--tp`, `--model-parallel-size`. |" in page()
    assert "| `--add-bias-linear`, `--no-add-bias-linear` |  | on |" in page()
    assert "Also `--disable-bias-linear` (off). |" in page()
    assert "| `--num-layers` | whole number | must be given |" in page()
    assert "| `--adam-beta1` | number | `0.9` |" in page()
