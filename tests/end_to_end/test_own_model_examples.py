"""The examples of the library run as a user starts them, and reach what they state: they end by an error if not."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.job import Job, run_script

EXAMPLES = Path(__file__).parents[2] / "examples"
VIT, RESNET, TRANSLATE = "vision/vit.py", "vision/resnet.py", "translation/translate.py"
DPO, GRPO, GAN = "preference/dpo.py", "grpo/grpo.py", "gan/circle.py"
FOLDERS = ("vision", "translation", "preference", "grpo", "gan")


def forked(folder: Path, example: str, *layout: str, ranks: int = 1) -> str:
    """Run an example in processes that have imported torch, and return its output."""
    with Job([EXAMPLES / example, *layout], ranks, folder) as job:
        assert job.wait() == [0] * ranks, "".join(map(job.stderr, range(ranks)))
        return job.stdout(0)


def run(example: str, *layout: str, ranks: int = 1) -> str:
    """Run an example as a user starts it, and return its output."""
    started = [str(EXAMPLES / example), *layout]
    if ranks > 1:
        options = ("--standalone", "--max-restarts=0", "--nproc-per-node", str(ranks))
        command = [sys.executable, "-m", "torch.distributed.run", *options, *started]
    else:
        command = [sys.executable, *started]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def reached(output: str) -> list[str]:
    """Return the figures that do not depend on the speed: those of the steps, and the last line's."""
    return re.findall(r"(?:loss|reward|accuracy|is|in) -?([0-9.]+)", output)


@pytest.mark.wide
@pytest.mark.parametrize("example", [DPO, VIT, RESNET, TRANSLATE, GRPO, GAN])
def test_an_example_reaches_what_it_states(example: str, tmp_path: Path) -> None:
    assert reached(forked(tmp_path, example))


@pytest.mark.wide
def test_an_example_reaches_it_on_a_pipeline(tmp_path: Path) -> None:
    assert reached(forked(tmp_path, TRANSLATE, "pp=2", ranks=2))


@pytest.mark.wide
@pytest.mark.parametrize(
    ("example", "layout", "ranks"),
    [
        pytest.param(VIT, ["zero=3"], 2, id="vit-zero3"),
        pytest.param(TRANSLATE, ["pp=4"], 4, id="translate-pp4", marks=pytest.mark.slow),
        pytest.param(VIT, ["pp=2", "stages_per_rank=2"], 2, id="vit-interleaved"),
        pytest.param(RESNET, ["pp=2"], 2, id="resnet-pp2", marks=pytest.mark.slow),
        pytest.param(DPO, ["zero=3"], 2, id="dpo-zero3"),
        pytest.param(GRPO, ["pp=2"], 2, id="grpo-pp2", marks=pytest.mark.slow),
        pytest.param(GRPO, ["zero=3"], 2, id="grpo-zero3"),
        pytest.param(GAN, ["zero=3"], 2, id="gan-zero3", marks=pytest.mark.slow),
    ],
)
def test_an_example_reaches_it_on_several_ranks(example: str, layout: list[str], ranks: int) -> None:
    assert reached(run(example, *layout, ranks=ranks))


@pytest.mark.wide
@pytest.mark.parametrize(
    "example", [VIT, *(pytest.param(e, marks=pytest.mark.slow) for e in (DPO, RESNET, TRANSLATE, GRPO))]
)
def test_an_example_gives_the_same_numbers_again(example: str) -> None:
    assert reached(run(example)) == reached(run(example))


@pytest.mark.parametrize(("example", "most"), [(VIT, 40), (TRANSLATE, 60), (GAN, 59)])
def test_examples_are_short(example: str, most: int) -> None:
    assert len((EXAMPLES / example).read_text().splitlines()) <= most


def test_examples_import_nothing_below_megalite() -> None:
    paths = [path for folder in FOLDERS for path in (EXAMPLES / folder).glob("*.py")]
    assert len(paths) == 8
    for path in paths:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        imported = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        imported += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        assert [name for name in imported if name.startswith("megalite")] in ([], ["megalite"]), path


def test_the_commands_in_a_docstring_are_those_of_its_file() -> None:
    for example in (VIT, RESNET, TRANSLATE, DPO, GRPO, GAN):
        text = ast.get_docstring(ast.parse((EXAMPLES / example).read_text())) or ""
        assert text.count(f"examples/{example}") == 2
        assert "torchrun --standalone --max-restarts=0 --nproc-per-node 2 " in text


def test_without_scikit_learn_the_package_to_install_is_said(tmp_path: Path) -> None:
    (tmp_path / "sklearn.py").write_text("raise ImportError('no module')\n")
    program = tmp_path / "program.py"
    program.write_text(f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(EXAMPLES / 'vision')!r}]; import digits")
    ended = run_script([program], tmp_path / "job")
    assert ended.code == 1
    assert ended.stderr == "the digits come with scikit-learn: pip install scikit-learn\n"
