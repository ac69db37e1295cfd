"""Which devices a service shares the memory of, and what it says of others: on the stand-in."""

from __future__ import annotations

import pytest

from tests.support.cuda_standin import Standin
from tiers.hbm.opened_devices import open_devices

GIB = 1 << 30
FIRST, SECOND = (f"GPU-abababab-abab-abab-abab-ababababab{number:02x}" for number in range(2))


@pytest.fixture(autouse=True)
def _library(standin: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFS_LIBCUDA", standin.path)


def test_all_devices_are_shared_or_those_that_are_named(standin: Standin) -> None:
    shared, missing = open_devices(GIB, ())
    assert ([each.device for each in shared], missing) == ([FIRST, SECOND], [])
    shared, missing = open_devices(GIB, (SECOND,))
    assert ([each.device for each in shared], missing) == ([SECOND], [])
    assert [standin.contexts(ordinal) for ordinal in range(2)] == [0, 0]


@pytest.mark.parametrize(
    ("fault", "why"), [("attribute:103:0", "exports no memory"), ("cuInit:100:0", "NO_DEVICE")]
)
def test_a_driver_that_shares_nothing_is_said(fault: str, why: str, standin: Standin) -> None:
    standin.set_faults(fault)
    shared, missing = open_devices(GIB, ())
    assert shared == []
    assert all("no GPU memory for blocks" in each and why in each for each in missing)
    assert missing


def test_a_machine_without_a_driver_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFS_LIBCUDA", "/none/libcuda.so")
    shared, [missing] = open_devices(GIB, ())
    assert shared == []
    assert "/none/libcuda.so" in missing


def test_a_part_of_a_gpu_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFS_STANDIN_NAME", "NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    shared, missing = open_devices(GIB, (FIRST,))
    assert shared == []
    assert "MIG 1g.10gb" in missing[0]


def test_a_device_that_is_not_there_or_too_small_is_left_out() -> None:
    other = FIRST.replace("a", "c")
    shared, missing = open_devices(GIB, (FIRST, other))
    assert [each.device for each in shared] == [FIRST]
    assert other in missing[0]
    shared, missing = open_devices(GIB + 1, (FIRST,))
    assert shared == []
    assert f"device {FIRST} has 1 GiB" in missing[0]
