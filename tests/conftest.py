"""Fixtures that test modules of several layers share."""

import shutil
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.crash_harness import fast_directory
from tests.support.door import door, mode_service
from tests.support.leftovers import Run
from tests.support.seeds import SEED, repeat_command

__all__ = ["door", "fast_path", "mode_service"]


def pytest_configure(config: pytest.Config) -> None:
    """Have the run say what it leaves, and Hypothesis draw from the text of each test unless it is given a seed.

    Neither its deadline nor how long it draws for is judged: both say how busy the machine is.
    """
    settings.register_profile(
        "kvfs",
        deadline=None,
        derandomize=config.getoption("hypothesis_seed") is None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("kvfs")
    if not hasattr(config, "workerinput"):  # a worker of the process that controls the run
        config.pluginmanager.register(Run())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Have a red test say the one command that repeats it."""
    report = yield
    if report.failed:
        callspec = getattr(item, "callspec", None)
        seed = SEED if callspec is None else callspec.params.get("seed", SEED)
        command = repeat_command(item.nodeid, seed, item.config.getoption("hypothesis_seed"))
        report.sections.append(("to repeat it", command))
    return report


@pytest.fixture
def fast_path() -> Iterator[Path]:
    """A directory where a sync costs little, that is gone afterwards."""
    path = Path(tempfile.mkdtemp(prefix="kvfs-test-", dir=fast_directory()))
    yield path
    shutil.rmtree(path)
