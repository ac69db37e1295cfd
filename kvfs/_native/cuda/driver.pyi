"""The CUDA driver, opened at run time: devices, memory that processes share, streams, events, copies and kernels.

Every call raises the exceptions of `kvfs.errors.from_cuda`; messages name the call and the driver's own error.
An address is a number in the unified address space, of the device or of registered host memory.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self, final

VIRTUAL_MEMORY: Final = 102
POSIX_DESCRIPTORS: Final = 103
READ_ONLY_REGISTRATION: Final = 113

def open_driver(path: str | None = None) -> Driver:
    """Open libcuda: `path`, the environment's KVFS_LIBCUDA, or the system's. Raises DeviceMissing: none, or too old."""

@final
class Driver:
    """Hold the driver's entry points. No call of it makes a context."""

    @property
    def path(self) -> str: ...
    @property
    def version(self) -> int:
        """Return the CUDA version of the driver: 13000 is 13.0."""

    @property
    def copies_in_batches(self) -> bool:
        """Return whether the driver has cuMemcpyBatchAsync (12.8)."""

    def devices(self) -> list[Device]: ...
    def import_allocation(self, fd: int, size_bytes: int) -> Allocation:
        """Import what `Allocation.export` of any process gave; `fd` stays the caller's, to close."""

@final
class Device:
    """Name a GPU. Between processes it is the UUID that names one: ordinals differ."""

    @property
    def ordinal(self) -> int: ...
    @property
    def uuid(self) -> str:
        """Return the UUID as NVML and nvidia-smi write it: `GPU-` and 32 hexadecimal digits in five groups."""

    @property
    def name(self) -> str: ...
    @property
    def total_bytes(self) -> int: ...
    @property
    def granularity_bytes(self) -> int:
        """Return what sizes of allocations are multiples of."""

    @property
    def shares_memory(self) -> bool:
        """Return whether its allocations can be exported as file descriptors."""

    def attribute(self, number: int) -> int:
        """Return a CU_DEVICE_ATTRIBUTE."""

    def create(self, size_bytes: int) -> Allocation:
        """Allocate memory that can be exported, without a context. Raises OutOfResources, InvalidRequest."""

    def map(self, allocation: Allocation, *, writable: bool = True) -> Mapping:
        """Map the whole allocation for this device. `writable=False` guards against accidents alone."""

    def retain_context(self) -> Context:
        """Retain the device's primary context, which is made by the first who does."""

@final
class Allocation:
    """Own one reference to physical memory of a device; exported descriptors and mappings have their own."""

    @property
    def size_bytes(self) -> int: ...
    def export(self) -> int:
        """Return a new file descriptor of the memory, close-on-exec; it keeps the memory after every release."""

    def release(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

@final
class Mapping:
    """Own a range of addresses with an allocation behind it."""

    @property
    def address(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    def unmap(self) -> None:
        """End the range; no copy that uses it may be in flight."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

@final
class Context:
    """Hold a device's primary context. Any thread may use it; the thread's current context stays what it was.

    An error of `ContextLost` ends it for the whole process.
    """

    @property
    def device(self) -> Device: ...
    @property
    def memory_bytes(self) -> tuple[int, int]:
        """Return the device's memory: (free, total)."""

    def stream(self) -> Stream: ...
    def borrow_stream(self, handle: int) -> Stream:
        """Take the driver's handle of a stream that is somebody else's, who outlives its use; 0: the default stream."""

    def event(self, *, sleeps: bool = False) -> Event:
        """Make an event. Who waits for it keeps a processor busy until it is reached, or `sleeps`, and wakes later."""

    def register(self, address: int, size_bytes: int, *, read_only: bool = False) -> Registration:
        """Pin memory of this process for the device's copies; the pages must stay. Raises Unsupported."""

    def load_module(self, image: bytes) -> Module:
        """Load PTX or a cubin."""

    def allocate(self, size_bytes: int) -> LegacyMemory:
        """Allocate memory of cuMemAlloc, where allocations cannot be exported as descriptors."""

    def open_handle(self, handle: bytes) -> LegacyMemory:
        """Open the whole allocation that `LegacyMemory.export` of another process named."""

    def export_handle(self, address: int) -> tuple[bytes, int]:
        """Return the 64-byte handle of the cuMemAlloc memory that holds `address`, and the offset of it there."""

    def release(self) -> None:
        """Release the context, after everything made in it."""

@final
class LegacyMemory:
    """Own memory of cuMemAlloc, or one opening of another process's; `size_bytes` is 0 for the latter."""

    @property
    def address(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    def free(self) -> None: ...

@final
class Registration:
    """Own the pinning of a range of host memory."""

    @property
    def address(self) -> int:
        """Return where the device sees the memory."""

    @property
    def size_bytes(self) -> int: ...
    def unregister(self) -> None: ...

@final
class Stream:
    """Run copies and kernels one after the other, beside other streams."""

    @property
    def handle(self) -> int:
        """Return the driver's handle."""

    def copy(self, destination: int, source: int, size_bytes: int) -> None:
        """Start a copy, in whichever direction the addresses say."""

    def wait(self, event: Event) -> None:
        """Hold what is started later until the event's last record is reached."""

    def query(self) -> bool:
        """Return whether everything started has ended. Raises what went wrong with it."""

    def synchronize(self) -> None: ...
    def destroy(self) -> None: ...

@final
class Event:
    """Mark a point of a stream. An event never recorded counts as reached."""

    def record(self, stream: Stream) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def destroy(self) -> None: ...

@final
class Module:
    """Own loaded kernels."""

    def launch(
        self,
        name: str,
        stream: Stream,
        grid: int,
        block: int,
        arguments: Sequence[int],
        *,
        shared_bytes: int = 0,
    ) -> None:
        """Start `grid` blocks of `block` threads; the kernel's parameters are all 64-bit integers or addresses."""

    def unload(self) -> None: ...
