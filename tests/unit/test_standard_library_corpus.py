"""The corpus of `make train`: real, whole, the same each time."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "examples" / "standard_library_corpus.py"


@pytest.mark.wide
def test_the_corpus_is_several_megabytes_of_real_sources_and_the_same_each_time(tmp_path: Path) -> None:
    first, second = tmp_path / "first.jsonl", tmp_path / "deeper" / "second.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(PROGRAM), "--output", str(first)])
        runpy.run_path(str(PROGRAM))["main"]()
    # Sets have another order in another process.
    subprocess.run([sys.executable, PROGRAM, "--output", second], check=True, capture_output=True)
    assert first.read_bytes() == second.read_bytes()
    texts = [json.loads(line)["text"] for line in first.read_text().splitlines()]
    assert sum(map(len, texts)) > 3_000_000
    assert any("class ArgumentParser" in text for text in texts)
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".tmp"] == []
