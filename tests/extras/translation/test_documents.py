"""The page on other programs: each command runs on the files of its section, with the output that this shows."""

from __future__ import annotations

import re
import shlex
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from megalite.config.run import fields_by_name
from megalite.errors import ConfigurationError
from megalite.extras.translation.commands import translate

PAGE = (Path(__file__).parents[3] / "docs" / "migration.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
FILE = re.compile(r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^```bash\n(.*?)^```\n\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", ["Megatron-LM", "DeepSpeed"])
def test_commands_print_what_the_page_shows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = SECTIONS[name]
    monkeypatch.chdir(tmp_path)
    for file, content in FILE.findall(page):
        (tmp_path / file).write_text(content)
    commands = COMMAND.findall(page)
    assert len(commands) == page.count("```bash") > 0
    for command, output in commands:
        python, program, *flags = shlex.split(command)
        assert (python, program) == ("python", "tools/translate.py")
        monkeypatch.setattr(sys, "argv", [program, *flags])
        with suppress(ConfigurationError):  # of what is needed, which the page shows
            translate.main()
        begin, *_ = output.partition("    ...\n")
        assert capsys.readouterr().out.startswith(begin.removesuffix("...\n"))


@pytest.mark.parametrize(
    ("name", "of_torchrun"),
    [
        ("FSDP and Accelerate", {"nproc-per-node", "nnodes"}),
        ("Horovod and TensorFlow", {"standalone", "nproc-per-node", "nnodes"}),
    ],
)
def test_tables_name_flags_that_exist(name: str, of_torchrun: set[str]) -> None:
    known = {name.replace("_", "-") for name in fields_by_name()}
    flags = set(re.findall(r"--([a-z][a-z0-9-]+)", SECTIONS[name]))
    assert flags - known == of_torchrun
