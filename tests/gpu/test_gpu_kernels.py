"""The checksum that a device computes is the store's, for every size and place."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvfs._native.hash.hashing import xxh3_64
from tests.support.gpu_memory import DeviceMemory, HostMemory, Kernels
from tests.support.seeds import SEED

SIZE = 16 << 20
EDGES = [241, 1023, 1024, 1025, 1088, 1089, 2047, 2048, 2049, 32_768, 32_769, 33_793, 65_536, 65_537]


@pytest.mark.seeded
def test_a_device_has_the_stores_checksum(kernels: Kernels, on_device: Callable[[int], DeviceMemory]) -> None:
    draw = random.Random(f"{SEED}.checksums")
    memory, data = on_device(SIZE), draw.randbytes(SIZE)
    memory.write(data)
    sizes = EDGES + [draw.randrange(241, 300_000) for _ in range(400)] + [SIZE - 8, 2 << 20, (2 << 20) + 5]
    ranges = [(draw.randrange(0, SIZE - size + 1), size) for size in sizes]
    ranges += [(offset // 16 * 16, size) for offset, size in ranges]
    found = kernels.checksums([(memory.address + offset, size) for offset, size in ranges])
    assert found == [xxh3_64(data[offset : offset + size]) for offset, size in ranges]


def test_one_byte_makes_another_checksum(kernels: Kernels, on_device: Callable[[int], DeviceMemory]) -> None:
    memory = on_device(SIZE)
    data = bytearray(random.Random(3).randbytes(100_000))
    memory.write(bytes(data))
    places = [0, 1, 1023, 1024, 50_001, 99_935, 99_936, 99_999]
    seen = {kernels.checksums([(memory.address, len(data))])[0]}
    for place in places:
        memory.write(bytes([data[place] ^ 1]), place)
        seen.add(kernels.checksums([(memory.address, len(data))])[0])
    assert len(seen) == len(places) + 1


def test_registered_memory_of_the_host_is_checked_where_it_lies(
    kernels: Kernels, on_host: Callable[[int], HostMemory]
) -> None:
    host = on_host(1 << 20)
    data = random.Random(4).randbytes(1 << 20)
    host.pages[:] = data
    assert kernels.checksums([(host.address, 1 << 20)]) == [xxh3_64(data)]
