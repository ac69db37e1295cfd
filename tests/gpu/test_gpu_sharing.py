"""Memory of a device that processes share by descriptors: who reads it, who outlives whom, and what a fault ends."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import pytest

from kvfs._native.cuda.driver import Context, Device, Driver
from kvfs._native.hash.hashing import xxh3_64
from tests.gpu.conftest import ON_GPU
from tests.gpu.peer import pattern
from tests.support.gpu_memory import DeviceMemory
from tests.support.gpu_peers import Peer, PeerFailed
from tests.support.waits import eventually

SIZE = 4 << 20
PART = 1 << 20

MakePeer = Callable[[], Peer]
MakeMemory = Callable[[int], DeviceMemory]


def lend(memory: DeviceMemory, peer: Peer, *, writable: bool = True) -> None:
    """Have a peer map memory as its number 0."""
    fd = memory.allocation.export()
    peer.order("map", fd, number=0, size_bytes=memory.size_bytes, writable=writable)
    os.close(fd)


def test_the_device_says_what_it_shares(device: Device) -> None:
    assert device.shares_memory
    assert device.uuid.startswith("GPU-")
    assert (2 << 20) % device.granularity_bytes == 0


def test_what_one_process_writes_another_reads(on_device: MakeMemory, peer: MakePeer) -> None:
    memory, other = on_device(SIZE), peer()
    memory.write(pattern(1, PART), SIZE - PART)
    lend(memory, other)
    expected = xxh3_64(pattern(1, PART))
    assert other.order("checksums", number=0, offset=SIZE - PART, size_bytes=PART) == [expected, expected]
    other.order("write", number=0, offset=PART, seed=2, size_bytes=PART)
    assert memory.read(PART, PART) == pattern(2, PART)


def test_two_mappings_show_the_same_memory(context: Context, driver: Driver, on_device: MakeMemory) -> None:
    memory = on_device(SIZE)
    fd = memory.allocation.export()
    with DeviceMemory(context, driver.import_allocation(fd, SIZE)) as other:
        os.close(fd)
        assert other.address != memory.address
        other.write(pattern(3, PART), PART)
        assert memory.read(PART, PART) == pattern(3, PART)


def test_memory_outlives_the_process_that_made_it(context: Context, driver: Driver, peer: MakePeer) -> None:
    maker = peer()
    fd = maker.receive("make", size_bytes=SIZE)
    with DeviceMemory(context, driver.import_allocation(fd, SIZE)) as memory:
        os.close(fd)
        memory.write(pattern(4, SIZE))
        maker.kill()
        assert memory.read() == pattern(4, SIZE)
        memory.write(pattern(5, PART), PART)
        assert memory.read(PART, PART) == pattern(5, PART)


def test_a_descriptor_alone_keeps_the_memory_and_its_bytes(
    context: Context, driver: Driver, peer: MakePeer
) -> None:
    maker, writer = peer(), peer()
    fd = maker.receive("make", size_bytes=SIZE)
    maker.kill()
    writer.order("map", fd, number=0, size_bytes=SIZE)
    writer.order("write", number=0, offset=0, seed=6, size_bytes=SIZE)
    writer.kill()
    with DeviceMemory(context, driver.import_allocation(fd, SIZE)) as memory:
        assert memory.read() == pattern(6, SIZE)
    os.close(fd)


def test_what_was_imported_has_its_first_descriptor_alone(
    context: Context, driver: Driver, on_device: MakeMemory, peer: MakePeer
) -> None:
    memory, other = on_device(SIZE), peer()
    memory.write(pattern(7, SIZE))
    lend(memory, other)
    with pytest.raises(
        PeerFailed, match="InvalidRequest: cuMemExportToShareableHandle: CUDA_ERROR_INVALID_VALUE"
    ):
        other.receive("export", number=0)
    fd = other.receive("descriptor", number=0)
    other.kill()
    with DeviceMemory(context, driver.import_allocation(fd, SIZE)) as again:
        os.close(fd)
        assert again.read() == pattern(7, SIZE)


@pytest.mark.skipif(not ON_GPU, reason="the stand-in counts the memory of one process")
def test_a_killed_importer_leaves_the_memory_free(context: Context, device: Device, peer: MakePeer) -> None:
    size_bytes = 256 << 20
    other = peer()
    other.order("map", other_fd := other.receive("make", size_bytes=SIZE), number=1, size_bytes=SIZE)
    os.close(other_fd)
    before = context.memory_bytes[0]
    with device.create(size_bytes) as allocation:
        fd = allocation.export()
    other.order("map", fd, number=0, size_bytes=size_bytes)
    os.close(fd)
    assert context.memory_bytes[0] <= before - size_bytes
    other.kill()
    eventually(
        lambda: context.memory_bytes[0] >= before, "the memory that a killed process had mapped is free"
    )


@pytest.mark.parametrize("way", ["copy", "kernel"])
def test_a_write_through_a_read_only_mapping_ends_its_own_process_alone(
    way: str, on_device: MakeMemory, peer: MakePeer
) -> None:
    if way == "kernel" and not ON_GPU:
        pytest.skip("a kernel of the stand-in is a function of the process")
    memory, reader = on_device(SIZE), peer()
    memory.write(pattern(8, SIZE))
    lend(memory, reader, writable=False)
    expected = xxh3_64(pattern(8, SIZE))
    assert reader.order("checksums", number=0, offset=0, size_bytes=SIZE) == [expected, expected]
    orders = {
        "copy": partial(reader.order, "write", number=0, offset=0, seed=9, size_bytes=PART),
        "kernel": partial(reader.order, "write_by_kernel", number=0, size_bytes=SIZE),
    }
    with pytest.raises(PeerFailed) as caught:
        orders[way]()
    print(f"a {way} through a read-only mapping: {caught.value}")
    assert memory.read() == pattern(8, SIZE)
    memory.write(pattern(10, PART))
    assert memory.read(PART) == pattern(10, PART)


def test_legacy_memory_is_opened_by_another_process(context: Context, peer: MakePeer) -> None:
    memory = context.allocate(SIZE)
    handle, offset = context.export_handle(memory.address + PART)
    assert offset % SIZE == PART
    opened = peer()
    opened.order("open_handle", number=0, handle=handle.hex(), size_bytes=SIZE)
    opened.order("write", number=0, offset=PART, seed=11, size_bytes=PART)
    other = peer()
    other.order("open_handle", number=0, handle=handle.hex(), size_bytes=SIZE)
    expected = xxh3_64(pattern(11, PART))
    assert other.order("checksums", number=0, offset=offset, size_bytes=PART) == [expected, expected]
    for each in (opened, other):
        each.order("unmap", number=0)
    memory.free()
