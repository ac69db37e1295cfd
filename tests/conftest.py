"""Fixtures that test modules of several layers share."""

import gc
import shutil
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

from tests.support.certificates import cluster_tls
from tests.support.crash_harness import fast_directory
from tests.support.door import door, mode_service
from tests.support.forked import end_imported
from tests.support.leftovers import Run
from tests.support.seeds import SEED, repeat_command

__all__ = ["cluster_tls", "door", "fast_path", "mode_service"]

ROOT: Final = Path(__file__).resolve().parent
LONGEST: Final = (
    "packaging/test_wheel.py",
    "mounts/test_answers_are_final.py",
    "mounts/test_mount_over_nvme.py",
    "mounts/test_large_files.py",
    "faults/test_service_crashes.py",
    "mounts/test_mount_model.py",
    "faults/test_crash_harness.py",
    "recovery/test_unverified_names.py",
    "scheduler/test_simulate.py",
    "foundation/test_soak.py",
    "mounts/test_restart.py",
    "mounts/test_mount_crashes.py",
    "faults/test_store_faults.py",
    "nvme/test_large_object_drafts.py",
    "cold/test_cold_endpoints.py",
    "mounts/test_mount_races.py",
    "faults/test_power_cuts.py",
    "recovery/test_failed_starts.py",
    "gateway/app/test_gateway_faults.py",
    "faults/test_large_object_power_cuts.py",
    "gateway/app/test_completion_kills.py",
    "mounts/test_names_after_crashes.py",
    "scheduler/conductor/test_chaos.py",
    "store/test_store_model.py",
    "recovery/test_mass_removals.py",
    "faults/test_full_tier.py",
    # In a run of their own.
    "engines/test_vllm_connector.py",
    "engines/test_conducted_engines.py",
    "engines/test_proxy_chats.py",
    "engines/test_vllm_adapters.py",
    "engines/test_followed_caches.py",
    "engines/test_followed_stores.py",
    "engines/test_lmcache_s3.py",
    "engines/test_vllm_states.py",
    "engines/test_vllm_hybrid.py",
    "engines/test_vllm_handover.py",
    "engines/test_wheel_in_an_engine.py",
    "engines/test_vllm.py",
    "engines/test_proxy.py",
)
"""Files that take longest, begun first: a worker that begins one at the end is alone with it. xdist would deal
files out by the number of their tests, and one of a single long test last."""


def draw_from_the_text_alone() -> None:
    """Have Hypothesis draw no constants of the modules that are imported, which another test may have imported.

    Else a change of any constant, and which files a worker had before, decide what a test draws.
    """
    nothing = Constants()
    vars(providers)["_get_local_constants"] = lambda: nothing
    assert providers.HypothesisProvider(None)._local_constants is nothing


def pytest_configure(config: pytest.Config) -> None:
    """Have the run say what it leaves, and Hypothesis draw from the text of each test unless it is given a seed.

    Neither its deadline nor how long it draws for is judged: both say how busy the machine is.
    """
    derandomize = config.getoption("hypothesis_seed") is None
    if derandomize:
        draw_from_the_text_alone()
    settings.register_profile(
        "kvfs",
        deadline=None,
        derandomize=derandomize,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("kvfs")
    if not hasattr(config, "workerinput"):  # a worker of the process that controls the run
        config.pluginmanager.register(Run())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let the collector of garbage pass over what is made here: it all stays, and is most that it would look at."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first; the others, and the tests of a file, stay in order."""
    places = {ROOT / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_sessionfinish() -> None:
    """End what processes were forked from."""
    end_imported()


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


@contextmanager
def _fast_folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kvfs-test-", dir=fast_directory()))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def fast_path() -> Iterator[Path]:
    """A directory where a sync costs little, that is gone afterwards."""
    with _fast_folder() as path:
        yield path


@pytest.fixture(scope="module")
def module_fast_path() -> Iterator[Path]:
    """Another one, for all tests of a module."""
    with _fast_folder() as path:
        yield path
