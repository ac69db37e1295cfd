"""A service that a stand-in for NVML tells who is on its GPUs: what a killed process might write waits for that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import undrained_service
from tests.support.nvml_standin import NvmlStandin, build_nvml
from tests.support.pool_services import engine_in_child, hbm, keys_of, pool_of, serving
from tests.support.service import Service
from tests.support.waits import eventually

BYTES = 3 * (64 << 10)


@pytest.fixture
def nvml(tmp_path: Path) -> NvmlStandin:
    return NvmlStandin(build_nvml(tmp_path), tmp_path / "nvml")


@contextmanager
def undrained(library: Path, nvml: NvmlStandin) -> Iterator[Service]:
    """A service that frees no drafts but those of a process that it knows to be off the device."""
    with serving(library, module=undrained_service.MODULE, **nvml.environment) as service:
        yield service
        assert not service.complaints()


def test_drafts_of_a_killed_process_are_free_once_it_is_off_the_device(
    library: Path, nvml: NvmlStandin
) -> None:
    with undrained(library, nvml) as service:
        child = engine_in_child(service, library, keys_of(3), seal=False)

        def soon(condition: Callable[[], bool], what: str) -> None:
            eventually(condition, what, every_s=0.02)

        nvml.say(child.pid, 0)
        soon(lambda: hbm(service)["missing"] != [], "a pid of nobody is noticed")
        assert pool_of(service)["clients_listed"] == 0
        [missing] = hbm(service)["missing"]
        assert "NVML lists process 0, which is none that this service sees" in missing
        assert service.log().count(missing) == 1
        nvml.say(child.pid)
        soon(lambda: pool_of(service)["clients_listed"] == 1, "it was seen on the device")
        assert hbm(service)["missing"] == []
        child.kill()
        waiting = {str(child.pid): BYTES}
        soon(lambda: pool_of(service)["quarantined_bytes_by_pid"] == waiting, "its drafts wait")
        nvml.say()
        soon(lambda: hbm(service)["pools"] == [], "all that it had is free")
