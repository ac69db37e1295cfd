"""A driver that is the stand-in, without faults before and after each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs._native.cuda.driver import Context, Device, Driver, open_driver
from tests.support.cuda_standin import Standin, build_standin


@pytest.fixture(scope="session")
def standin_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_standin(tmp_path_factory.mktemp("standin"))


@pytest.fixture
def standin(standin_path: Path) -> Iterator[Standin]:
    standin = Standin(standin_path)
    standin.set_faults()
    yield standin
    standin.set_faults()
    standin.hold(False)


@pytest.fixture
def driver(standin: Standin) -> Driver:
    return open_driver(standin.path)


@pytest.fixture
def device(driver: Driver) -> Device:
    return driver.devices()[0]


@pytest.fixture
def context(device: Device) -> Iterator[Context]:
    context = device.retain_context()
    yield context
    context.release()
