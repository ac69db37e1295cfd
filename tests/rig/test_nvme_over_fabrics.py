"""NVMe over Fabrics as the kernel has it, TCP and RDMA: connecting, a store on a namespace, a target that is gone for a
while. Runs in the machine of packaging/rig (`make test-rig`)."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

from kvfs import limits
from kvfs.cli.offline import nvmeof_command
from kvfs.errors import ConfigError, DeviceAway, DeviceFailed, FormatMismatch, NotFound
from kvfs.limits import MIB
from kvfs.system import fabrics
from kvfs.system.fabrics import Target, Transport
from tests.conformance.device_suite import PAGE, get, put
from tests.rig import nvme_target
from tests.rig.nvme_target import ADDRESSES, PORT, Exported
from tests.support.one_store import Life, look
from tests.support.waits import until
from tiers.device.device import open_device
from tiers.log.pool_files import open_pool

if os.uname().nodename != "rig":
    pytest.skip("needs the machine of packaging/rig: make test-rig", allow_module_level=True)

STORE = b"a store's own id"
TRANSPORTS: list[Transport] = ["tcp", "rdma"]
Export = Callable[[str, Transport], Exported]


@pytest.fixture(scope="module", autouse=True)
def target() -> None:
    nvme_target.start()


@pytest.fixture
def export(tmp_path: Path) -> Iterator[Export]:
    made: list[Exported] = []

    def make(name: str, transport: Transport) -> Exported:
        made.append(Exported(f"nqn.2026-01.test:{name}", tmp_path / name, transport))
        made[-1].make(33 * MIB)
        return made[-1]

    yield make
    for each in made:
        with_connections = {controller.nqn for controller in fabrics.controllers()}
        if each.nqn in with_connections:
            fabrics.disconnect(each.nqn)
        each.remove()
    assert fabrics.controllers() == []


def connect(exported: Exported) -> Path:
    """The block device of its namespace."""
    kind = exported.transport
    nvmeof_command.connect(exported.nqn, ADDRESSES[kind], PORT, kind, None, 1, -1)
    [controller] = fabrics.controllers()
    assert (controller.nqn, controller.transport, controller.state) == (exported.nqn, kind, "live")
    [device] = controller.devices
    return device


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_store_lives_on_a_namespace(
    tmp_path: Path, export: Export, transport: Transport, capsys: pytest.CaptureFixture[str]
) -> None:
    exported = export("store", transport)
    device = connect(exported)
    assert f"{device}: 33 MiB, nothing" in capsys.readouterr().out
    life = Life(tmp_path / "data", 5, (device,))
    trio.run(lambda: life.run(15, killed=False, settled=True))
    assert trio.run(look, life.path, life.devices) == life.expected.values
    held = exported.file.read_bytes()
    assert all(value[:4096] in held for value in life.expected.values.values() if len(value) > 8192)
    nvmeof_command.disconnect(exported.nqn)
    assert fabrics.controllers() == []
    again = Life(life.path, 6, (connect(exported),))
    assert trio.run(look, again.path, again.devices) == life.expected.values
    nvmeof_command.list_connections()
    assert "32 segments, device 0 of store" in capsys.readouterr().out


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_target_that_is_gone_costs_a_wait_and_comes_back_by_itself(
    tmp_path: Path, export: Export, transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "NVME_READ_S", 2.0)
    monkeypatch.setattr(limits, "NVME_WRITE_S", 4.0)
    exported = export("gone", transport)
    path = connect(exported)

    async def run() -> None:
        device = open_device()
        pool = await open_pool(
            device,
            tmp_path / "nvme",
            store_id=STORE,
            capacity_bytes=33 * MIB,
            devices=[path],
            segment_bytes=MIB,
        )
        segment = await pool.take()
        assert segment is not None
        await put(device, segment.fd, MIB // 2, b"here" * (PAGE // 4))
        await device.sync(segment.fd)
        with pytest.raises(ConfigError, match="used by another process"):
            nvmeof_command.disconnect(exported.nqn)
        exported.vanish()
        try:
            with pytest.raises(DeviceAway):
                await device.read(segment.fd, MIB // 2, memoryview(mmap.mmap(-1, PAGE)))
            assert device.drive.is_away
            with pytest.raises(DeviceAway):
                await put(device, segment.fd, MIB // 2 + PAGE, bytes(PAGE))
        finally:
            exported.appear()  # without it nothing that waits for the device ends
        await until(lambda: not device.drive.is_away and device.late_operations == 0)
        assert await get(device, segment.fd, MIB // 2, PAGE) == b"here" * (PAGE // 4)
        await put(device, segment.fd, MIB // 2 + PAGE, b"back" * (PAGE // 4))
        await device.sync(segment.fd)
        assert await get(device, segment.fd, MIB // 2 + PAGE, PAGE) == b"back" * (PAGE // 4)
        pool.close_files()
        await device.aclose()

    trio.run(run)


async def _open(path: Path, folder: Path) -> None:
    device = open_device()
    try:
        pool = await open_pool(
            device, folder, store_id=STORE, capacity_bytes=33 * MIB, devices=[path], segment_bytes=MIB
        )
        pool.close_files()
    finally:
        await device.aclose()


@pytest.mark.parametrize(("size_mib", "message"), [(16, "it shrank"), (33, "is empty: it lost what it held")])
def test_a_namespace_that_comes_back_smaller_or_empty_is_refused(
    tmp_path: Path, export: Export, size_mib: int, message: str
) -> None:
    exported = export("smaller", "tcp")
    trio.run(_open, connect(exported), tmp_path / "nvme")
    fabrics.disconnect(exported.nqn)
    exported.remove()
    if size_mib == 33:
        exported.file.unlink()
    else:
        os.truncate(exported.file, size_mib * MIB)
    exported.make(size_mib * MIB)
    with pytest.raises(FormatMismatch, match=message):
        trio.run(_open, connect(exported), tmp_path / "nvme")


def test_what_cannot_be_connected_to_is_said_in_one_line(export: Export) -> None:
    exported = export("there", "tcp")
    here = ADDRESSES["tcp"]
    for target, message in [
        (Target("nqn.2026-01.test:none", here), "nqn.2026-01.test:none at 127.0.0.1 port 4420: "),
        (Target(exported.nqn, here, 4421), "127.0.0.1 port 4421: Connection refused"),
        (Target("nqn.2026-01.test:none", ADDRESSES["rdma"], PORT, "rdma"), "port 4420: "),
    ]:
        with pytest.raises(DeviceFailed, match=message) as caught:
            fabrics.connect(target)
        assert "\n" not in str(caught.value)
        assert fabrics.controllers() == []
    with pytest.raises(NotFound, match="no connection to nqn"):
        fabrics.disconnect("nqn.2026-01.test:none")
