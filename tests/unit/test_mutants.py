"""The planted faults still find the code that they change, and name tests that exist."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.mutants import MUTANTS, ROOT, Mutant, sample


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.fault)
def test_a_mutant_finds_its_text_and_its_test(mutant: Mutant, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    (tmp_path / mutant.file).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / mutant.file, tmp_path / mutant.file)
    mutant.apply(tmp_path)
    assert (tmp_path / mutant.file).read_text() != (ROOT / mutant.file).read_text()
    file, test = mutant.test.split("::")
    assert f"def {test.split('[')[0]}(" in (ROOT / file).read_text()
    if request.config.args_source is pytest.Config.ArgsSource.TESTPATHS and not request.config.option.keyword:
        names = (item.nodeid for item in request.session.items)  # all there are: with their parameters
        assert any(name == mutant.test or name.startswith(f"{mutant.test}[") for name in names)


def test_a_text_that_is_gone_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text("a = 1\na = 1\n")
    for old, count in (("b = 1", 0), ("a = 1", 2)):
        with pytest.raises(ValueError, match=f"occurs {count} times in file.py"):
            Mutant("fault", "file.py", old, "", "").apply(tmp_path)


def test_a_sample_is_anothers_with_another_commit_and_meets_all_in_time() -> None:
    samples = [sample(MUTANTS, 12, str(seed)) for seed in range(400)]
    assert all(len(set(chosen)) == 12 for chosen in samples)
    assert samples[0] == sample(MUTANTS, 12, "0") != samples[1]
    drawn = [mutant for chosen in samples for mutant in chosen]
    cheap, dear = ([m for m in MUTANTS if m.test.startswith(f"tests/{place}")] for place in ("unit", "end_to_end"))
    assert set(drawn) >= set(cheap)
    assert 0 < sum(map(drawn.count, dear)) / len(dear) < sum(map(drawn.count, cheap)) / len(cheap)
