"""Fixtures that every test may ask for."""

from __future__ import annotations

import gc
import importlib
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path

import hypothesis
import pytest
import torch

from megalite.process.signals import STOP_SIGNALS
from tests.harness.extras import missing_extra
from tests.harness.job import Job
from tests.harness.rank_pool import RankPools
from tests.harness.turn import Turn
from tests.harness.wide import mark_all_but_few

hypothesis.settings.register_profile("megalite", deadline=None)  # no test asserts a time
hypothesis.settings.load_profile("megalite")

torch.set_num_threads(1)  # tensors this small gain nothing from a second one, which spins

# A shell starts what it runs in the background deaf to Ctrl-C, and so would be every program that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # until all tests are collected, which makes only objects that stay: a quarter of that time

_COLLECTED: set[str] = set()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --turn."""
    parser.addoption("--turn", type=Turn.parse, metavar="K/N", help="of the selected tests, those whose turn it is")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests whose turn it is not. Files that take seconds come first: none of them is the last."""
    costly = {item.path for item in items if item.get_closest_marker("costly") is not None}
    items.sort(key=lambda item: item.path not in costly)
    turn: Turn | None = config.option.turn
    if turn is not None:
        left_out = [item for item in items if not turn.has(item.nodeid)]
        items[:] = [item for item in items if turn.has(item.nodeid)]
        config.hook.pytest_deselected(items=left_out)


def pytest_collection(session: pytest.Session) -> None:
    """Import Triton in interpreter mode, if kernels are tested, before another test imports it as a compiler."""
    kernels = Path(__file__).parent / "kernels"
    asked = [session.config.invocation_params.dir / argument.split("::")[0] for argument in session.config.args]
    if sys.platform == "linux" and any(kernels.is_relative_to(path) or path.is_relative_to(kernels) for path in asked):
        importlib.import_module("tests.kernels.interpreter")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip a module that imports an optional library which is not installed; mark the cells that are wide."""
    report = yield
    mark_all_but_few(report.result)
    call = getattr(report, "call", None)
    if report.failed and call is not None and (name := missing_extra(call.excinfo.value)) is not None:
        del report.call
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, f"Skipped: needs {name}, which is not installed")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None]:
    """Skip a test whose fixtures need an optional library which is not installed."""
    return (yield from _skipping_without_extra())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None]:
    """Skip a test that needs an optional library which is not installed."""
    return (yield from _skipping_without_extra())


def _skipping_without_extra() -> Generator[None]:
    try:
        yield
    except Exception as error:
        if (name := missing_extra(error)) is None:
            raise
        pytest.skip(f"needs {name}, which is not installed")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Remember a test, also where its marks or a keyword leave it out later."""
    _COLLECTED.add(item.nodeid)


def pytest_collection_finish() -> None:
    """Leave what is imported and collected out of every later garbage collection: 0.2 s each."""
    gc.enable()
    gc.collect()  # after it, Python looks at all objects only once there are a quarter more
    gc.freeze()


@pytest.fixture(scope="session")
def collected_tests() -> set[str]:
    """Names of all tests that were collected, with their parameters, whether they run or not."""
    return _COLLECTED


@pytest.fixture(autouse=True)
def deterministic_mode_as_before() -> Iterator[None]:
    """Leave torch's deterministic mode, which is the process's, to the next test as it was."""
    before = torch.are_deterministic_algorithms_enabled()
    yield
    if torch.are_deterministic_algorithms_enabled() != before:
        torch.use_deterministic_algorithms(before)


@pytest.fixture(autouse=True)
def stop_signals_as_before() -> Iterator[None]:
    """Bring back the handlers: an ignored SIGTERM would be passed on to every program that a later test starts."""
    before = [(number, signal.getsignal(number)) for number in STOP_SIGNALS]
    yield
    for number, handler in before:
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)


@pytest.fixture(scope="session")
def rank_pools() -> Iterator[RankPools]:
    """Pools of ranks that live for the whole run: `rank_pools(4).run(function, *args)`."""
    pools = RankPools()
    yield pools
    pools.close()


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Runs an entry script on several ranks: `spawn(["pretrain_gpt.py", ...], world_size=2)`; see Job.

    The jobs' outputs go to `job0`, `job1`, ... under the test's temporary directory, unless `directory` is given.
    """
    with ExitStack() as jobs:
        count = 0

        def spawn_job(
            argv: list[str | Path], world_size: int, directory: Path | None = None, **environment: str
        ) -> Job:
            nonlocal count
            count += 1
            job = Job(argv, world_size, directory or tmp_path / f"job{count - 1}", environment)
            return jobs.enter_context(job)

        yield spawn_job
