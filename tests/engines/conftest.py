"""What the tests with real engines share: the engines' python, a bucket on the mount, and vLLM's first two runs.

All of it lasts for the session: an engine process takes half a minute to start.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.engines.engine import PROMPTS, STORED, VARIANTS, Engines, Run
from tests.engines.tiny_llama import write_model
from tests.support.door import BUCKET, ON_DIRECTORY, TEST_PATH, need_mount
from tests.support.service import ROOT, Service


@pytest.fixture(scope="session")
def engine_python() -> str:
    python = os.environ.get("KVFS_ENGINES_PYTHON", str(ROOT / ".venv-engines/bin/python"))
    if not os.path.exists(python):
        pytest.skip("no engines' environment: make test-engines")
    return python


@pytest.fixture(scope="session")
def engine_wheels(engine_python: str) -> str:
    """Where SGLang's and LMCache's wheels are, without what they need of a GPU."""
    wheels = os.environ.get("KVFS_ENGINES_WHEELS", str(Path(engine_python).parent.parent / "wheels"))
    if not os.path.exists(wheels):
        pytest.skip("no wheels of SGLang and LMCache: make test-engines")
    return wheels


@pytest.fixture(scope="session")
def work() -> Iterator[Path]:
    """A folder for models and logs, and for what engines leave in their temporary folder."""
    with (
        tempfile.TemporaryDirectory(prefix="kvfs-engines-") as directory,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TMPDIR", directory)
        yield Path(directory)


@pytest.fixture(scope="session")
def service() -> Iterator[Service | None]:
    """One service with an NVMe tier; None where the tests run on a plain directory."""
    if ON_DIRECTORY:
        yield None
        return
    need_mount()
    with Service(nvme="256MiB") as running:
        yield running
        assert not running.complaints()


@pytest.fixture(scope="session")
def bucket(service: Service | None) -> Iterator[Path]:
    """A bucket on the mount."""
    if service is None:
        plain = Path(tempfile.mkdtemp(dir="/dev/shm" if TEST_PATH == "dir" else TEST_PATH))
        yield plain
        shutil.rmtree(plain)
        return
    path = service.mount / BUCKET
    path.mkdir()
    yield path


@pytest.fixture(scope="session")
def engines(engine_python: str, work: Path) -> Engines:
    write_model(work / "model")
    return Engines(engine_python, work)


@pytest.fixture(scope="session")
def first_pair(engines: Engines, bucket: Path) -> tuple[Run, Run]:
    """The reference without a cache, and the run that stores: side by side."""
    with ThreadPoolExecutor() as pool:
        reference = pool.submit(engines.run, "no-cache", {**PROMPTS, **VARIANTS}, None)
        store = pool.submit(engines.run, "store", STORED, bucket / "kv", prefix_caching=True)
        return reference.result(), store.result()


@pytest.fixture(scope="session")
def reference(first_pair: tuple[Run, Run]) -> Run:
    return first_pair[0]


@pytest.fixture(scope="session")
def store(first_pair: tuple[Run, Run]) -> Run:
    return first_pair[1]
