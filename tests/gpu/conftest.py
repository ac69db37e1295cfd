"""The driver that these tests run on: with KVFS_TEST_GPU=1 the machine's own, and the stand-in elsewhere.

What is here asks nothing of a driver that a GPU's does not do: bytes are moved by copies alone, a context is shared by
all tests of the process, and what ends one is done by another process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from kvfs._native.cuda.driver import Context, Device, Driver, open_driver
from tests.support.cuda_standin import build_standin
from tests.support.gpu_memory import DeviceMemory, HostMemory, Kernels
from tests.support.gpu_peers import Peer

ON_GPU = os.environ.get("KVFS_TEST_GPU") == "1"


def pytest_report_header() -> str | None:
    if not ON_GPU:
        return None
    driver = open_driver()
    devices = ", ".join(f"{device.name} ({device.uuid})" for device in driver.devices())
    return f"GPU: {devices}; CUDA {driver.version}"


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of libcuda; empty for the machine's."""
    return "" if ON_GPU else str(build_standin(tmp_path_factory.mktemp("standin")))


@pytest.fixture(scope="session")
def driver(library: str) -> Driver:
    return open_driver(library or None)


@pytest.fixture(scope="session")
def device(driver: Driver) -> Device:
    return driver.devices()[0]


@pytest.fixture(scope="session")
def context(device: Device) -> Iterator[Context]:
    context = device.retain_context()
    yield context
    context.release()


@pytest.fixture(scope="session")
def kernels(context: Context) -> Kernels:
    return Kernels(context)


@pytest.fixture
def ends() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def on_device(context: Context, ends: ExitStack) -> Callable[[int], DeviceMemory]:
    """Make memory of the device, of so many bytes."""
    return lambda size: ends.enter_context(DeviceMemory(context, context.device.create(size)))


@pytest.fixture
def on_host(context: Context, ends: ExitStack) -> Callable[[int], HostMemory]:
    """Make registered memory of this process, of so many bytes."""
    return lambda size: ends.enter_context(HostMemory(context, size))


@pytest.fixture
def peer(library: str, ends: ExitStack) -> Callable[[], Peer]:
    """Start another process on the same device."""
    return lambda: ends.enter_context(Peer(library))
