"""Output of programs: nothing in it gives commands to a terminal, whatever a file says."""

from __future__ import annotations

import ast
import json
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.process.output import printable, say, shell_word
from tests.harness.tool import run_tool

ROOT = Path(__file__).parents[2]
WRITERS = {"print", "sys.stdout.write", "sys.stderr.write", "stdout.write", "stderr.write"}
ANSWERS_A_PROGRAM = Path("megalite/data/chat_renderer.py")
HOSTILE = "a\x1b]0;title\x07b\x9b2Jc\u202ed\re\u2028f"


def test_all_that_is_printed_passes_one_function() -> None:
    for path in ROOT.glob("megalite/**/*.py"):
        text = path.read_text()
        if path.relative_to(ROOT) != ANSWERS_A_PROGRAM and ("print(" in text or "write(" in text):
            calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
            assert not [call.lineno for call in calls if ast.unparse(call.func) in WRITERS], path


def test_what_commands_a_terminal_is_escaped_and_nothing_else() -> None:
    assert printable(HOSTILE) == r"a\x1b]0;title\x07b\x9b2Jc\u202ed\re\u2028f"
    kept = "two lines\nwith\ta tab, größe, 漢字, שלום, 👩\u200d💻, \xa0"
    assert printable(kept) == kept


@given(st.text())
def test_no_control_character_is_left(text: str) -> None:
    import unicodedata

    left = {one for one in printable(text) if unicodedata.category(one) == "Cc"}
    assert left <= {"\n", "\t"}


def test_both_streams_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    say("out", "\x1b", sep="", end="!")
    say("err\x1b", to_error=True)
    assert capsys.readouterr() == ("out\\x1b!", "err\\x1b\n")


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), max_size=4))
def test_words_for_a_shell_are_printable_and_what_they_were(words: list[str]) -> None:
    quoted = " ".join(map(shell_word, words))
    assert printable(quoted) == quoted
    shown = subprocess.run(["bash", "-c", f"printf '%s\\0' {quoted}"], capture_output=True, env={"LC_ALL": "C.UTF-8"})
    assert shown.stdout.decode().split("\0")[:-1] == (words or [""])


def test_an_error_about_a_file_shows_its_name_and_values_escaped(tmp_path: Path) -> None:
    bad = tmp_path / "bad\x1b[2J.jsonl"
    bad.write_text(json.dumps({"other": "\x1b[31m"}) + "\n")
    flags = ["--tokenizer-type", "ByteTokenizer", "--input", bad, "--output-prefix", tmp_path / "c", "--workers", 1]
    ended = run_tool("preprocess", *flags)
    assert ended.code == 64
    assert "\x1b" not in ended.stderr
    assert r"bad\x1b[2J.jsonl" in ended.stderr
