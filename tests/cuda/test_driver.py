"""The CUDA binding's calls and faults, on a stand-in for the driver: what a GPU does is in tests/gpu."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvfs._native.cuda.driver import Context, Device, Driver, Mapping, open_driver
from kvfs.errors import (
    ContextLost,
    DeviceFailed,
    DeviceMissing,
    InvalidRequest,
    KvfsError,
    NotFound,
    OutOfResources,
    Unsupported,
    from_cuda,
    is_shortage,
)
from tests.support.cuda_standin import Standin

SIZE = 4 << 20
PTX = b".visible .entry standin_fill\0"


def write(mapping: Mapping, data: bytes, offset: int = 0) -> None:
    ctypes.memmove(mapping.address + offset, data, len(data))


def read(address: int, size_bytes: int) -> bytes:
    return ctypes.string_at(address, size_bytes)


class Host:
    """Memory of this process at a known address."""

    def __init__(self, size_bytes: int) -> None:
        self.pages = mmap.mmap(-1, size_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.pages))


# --- opening it ------------------------------------------------------------------------------------------


def test_a_missing_library_is_named() -> None:
    with pytest.raises(DeviceMissing, match=r"/nowhere/libcuda\.so"):
        open_driver("/nowhere/libcuda.so")


def test_the_environment_names_the_library(standin: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFS_LIBCUDA", standin.path)
    driver = open_driver()
    assert (driver.path, driver.version, driver.copies_in_batches) == (standin.path, 13000, True)


def test_a_library_that_is_no_driver_is_named() -> None:
    with pytest.raises(DeviceMissing, match="cuGetProcAddress_v2"):
        open_driver("libm.so.6")


def test_a_missing_symbol_is_named_with_its_version(standin: Standin) -> None:
    standin.set_faults("missing:cuMemCreate:0")
    with pytest.raises(DeviceMissing, match="cuMemCreate of version 10020"):
        open_driver(standin.path)


def test_batches_are_optional(standin: Standin) -> None:
    standin.set_faults("missing:cuMemcpyBatchAsync:0")
    assert not open_driver(standin.path).copies_in_batches


def test_faults_come_by_the_environment_too(standin_path: Path) -> None:
    code = "from kvfs._native.cuda.driver import open_driver; open_driver()"
    environment = os.environ | {"KVFS_LIBCUDA": str(standin_path), "KVFS_STANDIN_FAULTS": "cuInit:100:1"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "DeviceMissing: cuInit: CUDA_ERROR_NO_DEVICE" in run.stderr


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        (1, InvalidRequest),
        (2, OutOfResources),
        (100, DeviceMissing),
        (500, NotFound),
        (700, ContextLost),
        (719, ContextLost),
        (801, Unsupported),
        (999, DeviceFailed),
    ],
)
def test_results_become_exceptions(result: int, kind: type[KvfsError]) -> None:
    error = from_cuda(result, "CUDA_ERROR_X", "cuCall")
    assert (type(error), str(error)) == (kind, "cuCall: CUDA_ERROR_X")


# --- devices and memory ------------------------------------------------------------------------------------


def test_devices_are_known_by_uuid(driver: Driver) -> None:
    first, second = driver.devices()
    assert first.uuid == "GPU-abababab-abab-abab-abab-ababababab00"
    assert second.uuid == "GPU-abababab-abab-abab-abab-ababababab01"
    assert (second.ordinal, second.name, second.total_bytes) == (1, "stand-in 1", 1 << 30)
    assert (second.granularity_bytes, second.attribute(75)) == (2 << 20, 9)


def test_a_device_says_whether_it_shares_memory(standin: Standin, device: Device) -> None:
    assert device.shares_memory
    standin.set_faults("attribute:103:0")
    assert not device.shares_memory


def test_memory_is_made_and_shared_without_a_context(
    standin: Standin, device: Device, driver: Driver
) -> None:
    with device.create(SIZE) as allocation:
        fd = allocation.export()
        assert not os.get_inheritable(fd)
        with driver.import_allocation(fd, SIZE) as other:
            os.close(fd)
            with device.map(allocation) as mine, device.map(other) as theirs:
                write(mine, b"shared", SIZE - 6)
                assert read(theirs.address + SIZE - 6, 6) == b"shared"
    assert standin.contexts() == 0


def test_an_exported_descriptor_outlives_its_allocation(device: Device, driver: Driver) -> None:
    allocation = device.create(SIZE)
    with device.map(allocation) as mapping:
        write(mapping, b"kept")
    fd = allocation.export()
    allocation.release()
    allocation.release()
    with driver.import_allocation(fd, SIZE) as again, device.map(again, writable=False) as mapping:
        assert read(mapping.address, 4) == b"kept"
    os.close(fd)


def test_what_was_released_is_refused(device: Device) -> None:
    allocation = device.create(SIZE)
    allocation.release()
    for call in (allocation.export, lambda: device.map(allocation)):
        with pytest.raises(InvalidRequest, match="released"):
            call()


def test_what_is_collected_is_released(context: Context, device: Device) -> None:
    before = context.memory_bytes
    allocation = device.create(SIZE)
    mapping = device.map(allocation)
    assert context.memory_bytes == (before[0] - SIZE, before[1])
    del allocation
    assert context.memory_bytes[0] == before[0] - SIZE
    del mapping
    assert context.memory_bytes == before


def test_a_full_device_is_a_shortage(standin: Standin, device: Device) -> None:
    with pytest.raises(OutOfResources, match=r"cuMemCreate.*CUDA_ERROR_OUT_OF_MEMORY") as caught:
        device.create(2 << 30)
    assert is_shortage(caught.value)
    standin.set_faults("cuMemCreate:2:2")
    device.create(SIZE).release()
    with pytest.raises(OutOfResources):
        device.create(SIZE)
    device.create(SIZE).release()


@pytest.mark.parametrize("call", ["cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"])
def test_a_mapping_that_fails_keeps_nothing(call: str, standin: Standin, context: Context) -> None:
    before = context.memory_bytes
    allocation = context.device.create(SIZE)
    standin.set_faults(f"{call}:2:1")
    with pytest.raises(OutOfResources, match="CUDA_ERROR_OUT_OF_MEMORY"):
        context.device.map(allocation)
    allocation.release()
    assert context.memory_bytes == before


@pytest.mark.parametrize("size_bytes", [0, 1, (2 << 20) + 1])
def test_sizes_are_multiples_of_the_granularity(size_bytes: int, device: Device) -> None:
    with pytest.raises(InvalidRequest, match=f"{size_bytes} bytes"):
        device.create(size_bytes)


def test_a_descriptor_of_something_else_is_refused(driver: Driver) -> None:
    for fd in (-1, os.open("/dev/null", os.O_RDONLY)):
        with pytest.raises(InvalidRequest, match=f"fd {fd}"):
            driver.import_allocation(fd, SIZE)
        if fd >= 0:
            os.close(fd)


# --- streams, events and copies ----------------------------------------------------------------------------


def test_a_copy_completes_later_and_events_say_when(standin: Standin, context: Context) -> None:
    with context.device.create(SIZE) as allocation, context.device.map(allocation) as there:
        here, stream, event = Host(SIZE), context.stream(), context.event()
        here.pages[:5] = b"bytes"
        assert event.query()
        standin.hold(True)
        stream.copy(there.address, here.address, 5)
        stream.copy(there.address + 100, there.address, 5)
        stream.copy(here.address + 100, there.address + 100, 5)
        event.record(stream)
        assert (event.query(), stream.query(), read(there.address, 5)) == (False, False, bytes(5))
        standin.hold(False)
        event.synchronize()
        stream.synchronize()
        assert (event.query(), stream.query(), here.pages[100:105]) == (True, True, b"bytes")
        event.destroy()
        stream.destroy()
        with pytest.raises(InvalidRequest, match="stream was destroyed"):
            stream.query()
        with pytest.raises(InvalidRequest, match="event was destroyed"):
            event.query()


def test_a_stream_waits_for_another(standin: Standin, context: Context) -> None:
    here, first, second, event = Host(4096), context.stream(), context.stream(), context.event()
    here.pages[:1] = b"x"
    standin.hold(True)
    for i in range(200):
        first.copy(here.address + i + 1, here.address + i, 1)
    event.record(first)
    second.wait(event)
    second.copy(here.address + 1000, here.address + 200, 1)
    standin.hold(False)
    second.synchronize()
    assert here.pages[1000:1001] == b"x"


def test_the_context_of_a_thread_stays_what_it_was(standin: Standin, context: Context) -> None:
    context.stream().synchronize()
    with pytest.raises(NotFound):
        context.export_handle(1)
    assert standin.context_depth() == 0


def test_a_context_is_released_once(standin: Standin, device: Device) -> None:
    context = device.retain_context()
    stream = context.stream()
    context.release()
    context.release()
    assert standin.contexts() == 0
    with pytest.raises(InvalidRequest, match="context was released"):
        stream.query()
    kept = device.retain_context().stream()
    gc.collect()
    assert (standin.contexts(), kept.query()) == (1, True)
    del kept
    assert standin.contexts() == 0


def test_a_lost_context_stays_lost(standin: Standin, context: Context) -> None:
    stream, event = context.stream(), context.event()
    with context.device.create(SIZE) as allocation, context.device.map(allocation, writable=False) as there:
        here = Host(4096)
        standin.hold(True)
        stream.copy(there.address, here.address, 100)
        event.record(stream)
        standin.hold(False)
        for call in (stream.synchronize, stream.query, event.query, context.stream, stream.destroy):
            with pytest.raises(ContextLost, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
                call()


def test_the_owner_without_a_context_survives_the_loss(standin: Standin, context: Context) -> None:
    standin.set_faults("sticky:719:1")
    with pytest.raises(ContextLost, match="CUDA_ERROR_LAUNCH_FAILED"):
        context.event()
    with pytest.raises(ContextLost):
        context.event()
    with context.device.create(SIZE) as allocation:
        os.close(allocation.export())


@pytest.mark.parametrize("call", ["cuStreamCreate", "cuEventCreate", "cuDevicePrimaryCtxRetain"])
def test_each_object_says_that_it_was_not_made(call: str, standin: Standin, context: Context) -> None:
    standin.set_faults(f"{call}:2:0")
    make: dict[str, Callable[[], object]] = {"cuStreamCreate": context.stream, "cuEventCreate": context.event}
    with pytest.raises(OutOfResources, match=call):
        make.get(call, context.device.retain_context)()


# --- registered memory, legacy handles, kernels --------------------------------------------------------------


def test_host_memory_is_registered(standin: Standin, context: Context) -> None:
    here = Host(SIZE)
    registration = context.register(here.address, SIZE)
    assert (registration.address, registration.size_bytes) == (here.address, SIZE)
    with pytest.raises(DeviceFailed, match="CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"):
        context.register(here.address, SIZE)
    registration.unregister()
    registration.unregister()
    context.register(here.address, SIZE, read_only=True).unregister()


@pytest.mark.parametrize("call", ["cuMemHostRegister", "cuMemHostGetDevicePointer"])
def test_a_registration_that_fails_keeps_nothing(call: str, standin: Standin, context: Context) -> None:
    here = Host(SIZE)
    standin.set_faults(f"{call}:801:1")
    with pytest.raises(Unsupported, match="cuMemHostRegister"):
        context.register(here.address, SIZE)
    context.register(here.address, SIZE).unregister()


def test_legacy_memory_is_named_with_an_offset(context: Context) -> None:
    memory = context.allocate(10_000)
    handle, offset = context.export_handle(memory.address + 77)
    assert (len(handle), offset) == (64, 77)
    opened = context.open_handle(handle)
    ctypes.memset(memory.address + 77, 5, 1)
    assert read(opened.address + offset, 1) == b"\5"
    opened.free()
    memory.free()
    with pytest.raises(InvalidRequest, match="3 bytes"):
        context.open_handle(b"abc")


def test_kernels_are_launched_by_name(context: Context) -> None:
    here, stream, module = Host(4096), context.stream(), context.load_module(PTX)
    module.launch("standin_fill", stream, 1, 32, [here.address, 3, 0x61])
    stream.synchronize()
    assert here.pages[:4] == b"aaa\0"
    with pytest.raises(NotFound, match="nothing"):
        module.launch("nothing", stream, 1, 32, [])
    with pytest.raises(InvalidRequest, match="17 arguments"):
        module.launch("standin_fill", stream, 1, 32, range(17))
    module.unload()
    with pytest.raises(InvalidRequest, match="unloaded"):
        module.launch("standin_fill", stream, 1, 32, [0, 0, 0])
    with pytest.raises(DeviceFailed, match="CUDA_ERROR_INVALID_IMAGE"):
        context.load_module(b"no kernel")


@pytest.mark.parametrize("kind", [Driver, Device, Context])
def test_objects_come_from_the_driver_alone(kind: type) -> None:
    with pytest.raises(TypeError):
        kind()
