"""Mixes that change: nothing is lost or repeated, whenever a run stops, and whatever it is told then."""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megalite.data.datasets import Samples, build_token_datasets
from megalite.data.sampler import equal_deal
from megalite.data.tokenizers import build_tokenizer
from megalite.errors import ConfigurationError, DataError, MegaliteError
from megalite.extras.mixes import reading
from tests.extras.mixes.mixed_run import SEED, WHERE, WHOLE, MixedRun, of_blend, samples_of, write_files

TOKENS = {"web": 400, "code": 150, "math": 37, "tiny": 3}


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_files(tmp_path_factory.mktemp("files"), TOKENS)


def run_of(prefixes: dict[str, str], at: Path, *phases: Any, length: int = 4, **caps: float) -> MixedRun:
    """Return a run with these sources, and phases as (first token, weights)."""
    sources = {
        name: {"path": prefix, **({"max_epochs": caps[name]} if name in caps else {})}
        for name, prefix in prefixes.items()
    }
    return MixedRun(at, sources, [{"from": first, "weights": weights} for first, weights in phases], length)


def test_each_source_keeps_its_order_and_loses_nothing(prefixes: dict[str, str], tmp_path: Path) -> None:
    """Over three phases, in which sources join and leave and come back, each gives the samples that it gives alone."""
    mixed = run_of(
        prefixes, tmp_path, (0, {"web": 2, "code": 1}), (400, {"math": 1, "web": 1}), (800, {"code": 3, "tiny": 1})
    ).open()
    found = samples_of(mixed, range(400))
    for name, samples in found.items():
        alone = run_of(prefixes, tmp_path, (0, {name: 1})).open()
        assert samples == samples_of(alone, range(len(samples)))[name]
        seen = Counter(token for sample in samples for token in sample)
        epochs = len(samples) * 4 / TOKENS[name]
        assert set(seen.values()) <= {int(epochs), int(epochs) + 1}
    assert min(map(len, found.values())) > 3


PHASE = st.tuples(
    st.integers(0, 60),
    st.dictionaries(st.sampled_from(sorted(TOKENS)), st.sampled_from((0.5, 1, 2, 7)), min_size=1),
    st.sampled_from((1, 2, 4, 7, 16)),
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(PHASE, min_size=1, max_size=5), st.integers(1, 50), st.integers(1, 8))
def test_what_a_stop_changes_is_what_comes_after(
    prefixes: dict[str, str], tmp_path: Path, course: list[Any], lane: int, lanes: int
) -> None:
    """A run that is stopped and told another mix, and another length of samples, again and again."""
    with mock.patch.multiple(reading, LANE=lane, MOST_LANES=lanes):
        given_so_far: dict[str, list[int]] = {name: [] for name in TOKENS}
        saved, consumed, tokens = None, 0, 0
        for count, weights, length in course:
            run = run_of(prefixes, tmp_path, (0, weights), length=length)
            mix = run.open()
            if saved is not None:
                consumed = mix.resume(WHERE, saved, consumed, ()).consumed_samples
                assert consumed == -(-tokens // length)
            for number in range(consumed, consumed + count):
                given_so_far[mix.names[mix.of(number)]] += mix[number][:-1].tolist()
            consumed += count
            tokens = consumed * length
            counts = mix.tokens_until(consumed)
            assert {name: len(each) for name, each in given_so_far.items() if each} == {
                name: each for name, each in counts.items() if each
            }
            saved = run.checkpoint(mix)
        for name, each in given_so_far.items():
            # Pass after pass, each of its tokens comes once before any comes again.
            for first in range(0, len(each), TOKENS[name]):
                part = each[first : first + TOKENS[name]]
                assert len(set(part)) == len(part)
        # Whoever opens the last checkpoint goes on with the same samples, and saves the same.
        again = run.open()
        again.resume(WHERE, saved, consumed, ())
        assert [again[number].tolist() for number in range(consumed, consumed + 9)] == [
            mix[number].tolist() for number in range(consumed, consumed + 9)
        ]
        assert run.checkpoint(again) == saved


def test_a_changed_file_of_the_mix_alters_only_what_comes_after(prefixes: dict[str, str], tmp_path: Path) -> None:
    """A later phase that is edited leaves the present one as it is, to the sample; so does an equal schedule."""
    before = run_of(prefixes, tmp_path, (0, {"web": 2, "code": 1}), (800, {"math": 1}))
    first = before.open()
    after = run_of(prefixes, tmp_path, (0, {"web": 2, "code": 1}), (1000, {"math": 1, "tiny": 1}))
    second = after.open()
    resumed = second.resume(WHERE, before.checkpoint(first), 70, ())
    assert resumed.consumed_samples == 70
    assert resumed.why == "sample 250 is the first of a phase: tiny 50 %, math 50 %"
    assert [second[n].tolist() for n in range(200)] == [first[n].tolist() for n in range(200)]
    assert {second.names[second.of(n)] for n in range(200, 250)} == {"web", "code"}
    assert {second.names[second.of(n)] for n in range(250, 300)} == {"math", "tiny"}
    third = after.open()
    assert third.resume(WHERE, after.checkpoint(second), 90, ()).why is None
    assert third.history == second.history


def test_left_out_samples_are_passed_over(prefixes: dict[str, str], tmp_path: Path) -> None:
    """Samples that a run has left out count as given: the changed mix begins behind them."""
    run = run_of(prefixes, tmp_path, (0, {"web": 1}))
    mix = run.open()
    other = run_of(prefixes, tmp_path, (0, {"web": 1, "code": 1})).open()
    other.resume(WHERE, run.checkpoint(mix), 10, [(2, 4)])
    assert [other[n].tolist() for n in range(13)] == [mix[n].tolist() for n in range(13)]
    assert other.history.phases[1].first == 13
    assert other.after(10, [(2, 4)])["consumed_tokens/web"] == 40


BLENDS = [
    pytest.param(("3", "web", "1", "code", "1", "math"), id="weights"),
    pytest.param(("web", "code"), id="sizes"),
    pytest.param(("code",), id="one file"),
]


@pytest.mark.parametrize("length", [4, 7, 1])
@pytest.mark.parametrize("blend", BLENDS)
def test_a_mix_takes_over_from_a_blend(
    prefixes: dict[str, str], tmp_path: Path, blend: tuple[str, ...], length: int
) -> None:
    """Sources go on behind what the blend has read of them: in its order, if samples are as long as before."""
    data = replace(
        WHOLE,
        data_path=tuple(prefixes.get(each, each) for each in blend),
    )
    tokenizer, wanted, consumed = build_tokenizer(data, 10_000_000), 100 if len(blend) > 1 else 30, 25
    plain = build_token_datasets(data, Samples(wanted, 0, 0), SEED, tokenizer).train
    assert plain is not None
    read: dict[str, list[int]] = {name: [] for name in TOKENS}
    place = {token: name for name in TOKENS for token in tokens_of(prefixes, name)}
    for number in range(consumed):
        sample = plain[number][:-1].tolist()
        read[place[sample[0]]] += sample
    run = run_of(prefixes, tmp_path, (0, {"web": 1, "code": 1, "math": 1}), length=length)
    mix = run.open()
    resumed = mix.resume(WHERE, of_blend(data, wanted), consumed, ())
    start = resumed.consumed_samples
    assert start == -(-consumed * 4 // length)
    assert "takes over from a blend" in str(resumed.why)
    for name, samples in samples_of(mix, range(start, start + 100)).items():
        if not read[name] or name not in blend:
            continue
        alone = getattr(plain, "datasets", [plain])
        (own,) = (each for each in alone if each.indexed.prefix == prefixes[name])
        stream = own.epochs.count * TOKENS[name]
        rest = [token for sample in samples for token in sample]
        seen = Counter((read[name] + rest)[:stream])
        assert set(seen.values()) == {own.epochs.count} or len(read[name] + rest) < stream
        if length == 4:
            ours = len(read[name]) // 4
            kept = min(len(samples), len(own) - ours)
            assert samples[:kept] == [own[number][:-1].tolist() for number in range(ours, ours + kept)]
    # It can be stopped again, and goes on from there.
    again = run.open()
    again.resume(WHERE, run.checkpoint(mix), start + 30, ())
    assert [again[n].tolist() for n in range(start + 30, start + 60)] == [
        mix[n].tolist() for n in range(start + 30, start + 60)
    ]


def tokens_of(prefixes: dict[str, str], name: str) -> range:
    """Return the tokens of a file: no two files share one."""
    first = sum(TOKENS[each] for each in list(TOKENS)[: list(TOKENS).index(name)])
    return range(first, first + TOKENS[name])


def test_a_source_stops_at_its_epochs(prefixes: dict[str, str], tmp_path: Path) -> None:
    """At most two epochs of math: then the others have its share, and a note says where."""
    run = run_of(prefixes, tmp_path, (0, {"web": 1, "math": 1}), math=2)
    mix = run.open()
    found = samples_of(mix, range(100))["math"]
    assert len(found) == 2 * 37 // 4
    (note,) = mix.notes(100)
    last = max(number for number in range(100) if mix.names[mix.of(number)] == "math")
    assert f"math reaches max_epochs 2 at token {4 * (last + 1)}, in phase 1" in note
    assert mix.notes(last) == ()
    # A phase of later days counts what was given before.
    later = run_of(prefixes, tmp_path, (0, {"web": 1, "math": 1}), (200, {"web": 1, "math": 5}), math=3)
    second = later.open()
    second.resume(WHERE, run.checkpoint(mix), 50, ())
    assert len(samples_of(second, range(300))["math"]) == 3 * 37 // 4


def test_epochs_count_what_a_blend_has_taken(prefixes: dict[str, str], tmp_path: Path) -> None:
    """A blend has read half of math: 1.5 epochs of it are one more."""
    data = replace(WHOLE, data_path=(prefixes["math"],))
    mix = run_of(prefixes, tmp_path, (0, {"web": 1, "math": 1}), math=1.5).open()
    mix.resume(WHERE, of_blend(data, 30), 5, ())
    assert len(samples_of(mix, range(5, 100))["math"]) == (int(1.5 * 37) - 20) // 4


def test_samples_that_a_blend_has_left_out_end_no_run(prefixes: dict[str, str], tmp_path: Path) -> None:
    """The figures of a mix begin with its own samples: those that the blend passed over have no source there."""
    data = replace(WHOLE, data_path=(prefixes["code"],))
    mix = run_of(prefixes, tmp_path, (0, {"code": 1})).open()
    left_out = [(2, 4)]
    assert mix.resume(WHERE, of_blend(data, 30), 10, left_out).consumed_samples == 10
    assert mix.after(10, left_out) == {"consumed_tokens/code": 13 * 4.0}
    assert mix.after(12, [*left_out, (14, 15)]) == {"consumed_tokens/code": 15 * 4.0}


def test_the_order_is_of_the_seed_and_the_content(prefixes: dict[str, str], tmp_path: Path) -> None:
    """Other names, other places and more sources change no order; several files of a source are shuffled together."""
    alone = samples_of(run_of(prefixes, tmp_path, (0, {"web": 1})).open(), range(50))["web"]
    renamed = MixedRun(tmp_path, {"pages": {"path": prefixes["web"]}}, [{"weights": {"pages": 1}}]).open()
    assert samples_of(renamed, range(50))["pages"] == alone
    both = MixedRun(tmp_path, {"all": {"paths": [prefixes["web"], prefixes["code"]]}}, [{"weights": {"all": 1}}]).open()
    tokens = [token for number in range(550 // 4) for token in both[number][:-1].tolist()]
    assert len(set(tokens)) == len(tokens)
    assert np.mean([token >= 400 for token in tokens[:200]]) == pytest.approx(150 / 550, abs=0.15)


def test_the_label_behind_a_sample_is_the_token_that_follows(prefixes: dict[str, str], tmp_path: Path) -> None:
    """The last label is the first input of the sample that goes on there; at the end of a pass, of the next pass."""
    mix = run_of(prefixes, tmp_path, (0, {"code": 1})).open()
    samples = [mix[number].tolist() for number in range(60)]
    assert all(len(sample) == 5 for sample in samples)
    assert all(before[-1] == after[0] for before, after in itertools.pairwise(samples))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"code": {"path": "web"}}, "files of code were the source web before: keep its name"),
        ({"web": {"path": "code"}}, "the files of the source web have changed: 400 tokens with the checksum"),
    ],
)
def test_sources_that_are_not_what_they_were(
    prefixes: dict[str, str], tmp_path: Path, change: dict[str, dict[str, str]], message: str
) -> None:
    run = run_of(prefixes, tmp_path, (0, {"web": 1}))
    saved = run.checkpoint(run.open())
    sources = {name: {"path": prefixes[each["path"]]} for name, each in change.items()}
    (name,) = sources
    other = replace(run, sources=sources, phases=[{"weights": {name: 1}}])
    with pytest.raises(MegaliteError, match=message):
        other.open().resume(WHERE, saved, 10, ())


def test_a_changed_source_that_is_allowed_begins_anew(prefixes: dict[str, str], tmp_path: Path) -> None:
    """The others go on, to the sample, and the changed one is read from its beginning."""
    run = run_of(prefixes, tmp_path, (0, {"web": 2, "code": 1}))
    first = run.open()
    data = replace(run.data, allow_changed_sources=True)
    sources = {"web": {"path": prefixes["math"]}, "code": {"path": prefixes["code"]}}
    other = replace(run, sources=sources, data=data)
    mix = other.open()
    resumed = mix.resume(WHERE, run.checkpoint(first), 30, ())
    assert "changed files of web are read from their beginning" in str(resumed.why)
    code = samples_of(first, range(30))["code"] + samples_of(mix, range(30, 90))["code"]
    assert code == samples_of(run_of(prefixes, tmp_path, (0, {"code": 1})).open(), range(len(code)))["code"]
    alone = MixedRun(tmp_path, sources, [{"weights": {"web": 1}}]).open()
    web = samples_of(mix, range(30, 90))["web"]
    assert web == samples_of(alone, range(len(web)))["web"]
    assert mix.after(30)["consumed_tokens/web"] == 0


@pytest.mark.wide
@pytest.mark.parametrize("seed", range(20))
def test_so_do_thousands_of_schedules(prefixes: dict[str, str], tmp_path: Path, seed: int) -> None:
    """The same as above, for two thousand drawn schedules, from seeds instead of a search for small cases."""
    checked = test_what_a_stop_changes_is_what_comes_after.hypothesis.inner_test  # type: ignore[attr-defined]
    for trial in range(100):
        random = np.random.RandomState((seed, trial))
        course = []
        for _ in range(random.randint(1, 8)):
            names = random.choice(sorted(TOKENS), random.randint(1, 5), replace=False)
            weights = {str(name): float(10 ** random.uniform(-2, 2)) for name in names}
            course.append((int(random.randint(0, 60)), weights, int(random.choice((1, 2, 3, 5, 8, 24)))))
        checked(prefixes, tmp_path, course, int(random.randint(1, 50)), int(random.randint(1, 8)))


HOSTILE: dict[str, tuple[tuple[str | int, ...], object]] = {
    "weights that overflow": (("phases", 0, "weights"), {"web": 1e308, "code": 1e308}),
    "a weight of nothing": (("phases", 0, "weights"), {"web": 1e-320, "code": 1}),
    "no weights": (("phases", 0, "weights"), {}),
    "a source that is not there": (("phases", 0, "weights"), {"nowhere": 1}),
    "a phase that is to come": (("phases", 0, "first"), 50),
    "a phase of another length": (("phases", 0, "length"), 2),
    "a phase that ends before it begins": (("phases", 0, "until"), -1),
    "a length of nothing": (("phases", 0, "length"), 0),
    "no phases": (("phases",), []),
    "a source without files": (("sources", "web", "prefixes"), []),
    "a checksum that is a number": (("sources", "web", "identity"), 5),
    "tokens that are text": (("sources", "web", "tokens"), "many"),
    "a blend without length": (("sources", "web", "blend"), [None, 1, 0]),
    "a blend of fewer than nothing": (("sources", "web", "blend"), [10, -5, 4]),
    "more than a blend has": (("sources", "web", "blend"), [10, 10**6, 4]),
    "a blend without end": (("sources", "web", "blend"), [10**15, 1, 4]),
    "a share of three": (("share",), [0.0, 0.5, 1.0]),
    "a seed of text": (("seed",), "5"),
    "another version": (("version",), 99),
    "another length of samples": (("data", "seq_length"), 0),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_history_that_is_damaged_is_one_error(prefixes: dict[str, str], tmp_path: Path, what: str) -> None:
    run = run_of(prefixes, tmp_path, (0, {"web": 1, "code": 1}))
    saved = run.checkpoint(run.open())
    (*path, last), value = HOSTILE[what]
    place: Any = saved if path[:1] == ["data"] else saved["data_mix"]
    for key in path:
        place = place[key]
    place[last] = value
    with pytest.raises(MegaliteError) as caught:
        run.open().resume(WHERE, saved, 40, ())
    assert "\n" not in str(caught.value)


def test_samples_that_end_do_not_begin_again(prefixes: dict[str, str], tmp_path: Path) -> None:
    """A mix that is limited gives no sample twice where some are left out: it ends."""
    mix = run_of(prefixes, tmp_path, (0, {"math": 1}), math=1).open()
    deal = replace(equal_deal(0, 1, 9), left_out=[(0, 2)])
    wanted = [sample for each in deal.samples(0, 1, mix) for sample in each]
    assert wanted == [*range(3, 12)]
    assert [mix[number].tolist() for number in wanted[:6]]
    with pytest.raises(
        DataError, match="in phase 1, all sources have reached max_epochs at token 36: raise max_epochs"
    ):
        mix[9]
    assert mix.after(6, [(0, 2)]) == {"consumed_tokens/math": 24.0}


def test_another_length_is_refused_where_samples_are_left_out(prefixes: dict[str, str], tmp_path: Path) -> None:
    run = run_of(prefixes, tmp_path, (0, {"web": 1}))
    other = run_of(prefixes, tmp_path, (0, {"web": 1}), length=8)
    with pytest.raises(ConfigurationError, match="keep --seq-length 4"):
        other.open().resume(WHERE, run.checkpoint(run.open()), 40, [(0, 39)])


def test_a_mix_can_be_continued_again_from_elsewhere(prefixes: dict[str, str], tmp_path: Path) -> None:
    """A checkpoint leaves no trace when another one is loaded in its place."""
    run = run_of(prefixes, tmp_path, (0, {"web": 1, "code": 1}))
    mix, plain = run.open(), run.open()
    mix.resume(WHERE, of_blend(replace(WHOLE, data_path=(prefixes["code"],)), 30), 20, ())
    saved = run.checkpoint(plain)
    mix.resume(WHERE, saved, 20, ())
    plain.resume(WHERE, saved, 20, ())
    assert [mix[number].tolist() for number in range(20, 60)] == [plain[number].tolist() for number in range(20, 60)]


def test_files_that_change_back_are_other_ones_each_time(prefixes: dict[str, str], tmp_path: Path) -> None:
    """Each past has a name of its own, and the notes say where the new phase begins."""
    run = run_of(prefixes, tmp_path, (0, {"web": 1}))
    data = replace(run.data, allow_changed_sources=True)
    saved, consumed = run.checkpoint(run.open()), 0
    for other in ("code", "web", "code"):
        consumed += 10
        changed = replace(run, data=data, sources={"web": {"path": prefixes[other]}})
        mix = changed.open()
        why = mix.resume(WHERE, saved, consumed, ()).why
        assert why == (
            f"changed files of web are read from their beginning; sample {consumed} is the first of a phase: web 100 %"
        )
        saved = changed.checkpoint(mix)
    assert len(mix.history.sources) == 4
    assert [phase.first for phase in mix.history.phases] == [0, 10, 20, 30]


@pytest.mark.parametrize("link", [True, False])
def test_one_file_under_two_names_is_refused(prefixes: dict[str, str], tmp_path: Path, link: bool) -> None:
    other = f"{Path(prefixes['web']).parent}/../{Path(prefixes['web']).parent.name}/web_text_document"
    if link:
        other = str(tmp_path / "linked")
        Path(other).symlink_to(prefixes["web"])
    run = MixedRun(tmp_path, {"a": {"path": prefixes["web"]}, "b": {"path": other}}, [{"weights": {"a": 1, "b": 1}}])
    with pytest.raises(DataError, match="is in a and b: its samples would be repeated"):
        run.open()


def test_files_that_are_moved_and_renamed_are_known(prefixes: dict[str, str], tmp_path: Path) -> None:
    run = run_of(prefixes, tmp_path, (0, {"web": 1}))
    for suffix in (".bin", ".idx", ".megalite.json"):
        shutil.copy(f"{prefixes['web']}{suffix}", tmp_path / f"moved{suffix}")
    moved = {"path": str(tmp_path / "moved")}
    saved = run.checkpoint(run.open())
    replace(run, sources={"web": moved}).open().resume(WHERE, saved, 5, ())
    with pytest.raises(DataError, match="files of pages were the source web before"):
        MixedRun(tmp_path, {"pages": moved}, [{"weights": {"pages": 1}}]).open().resume(WHERE, saved, 5, ())
