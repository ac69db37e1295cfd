"""NVML, NVIDIA's library for management: which processes have a context on a device.

Responsibility: open the library at run time, and make its calls. By ctypes, which lets go of the GIL for a call: it is
asked about once a second while somebody is waited for, by a thread of its own, so a native module would save nothing.

Invariants: every error is a KvfsError that names the call; after one, the library is initialised anew by the next call,
which finds a device again that came back. No context is made.
Concurrency: one thread at a time; a call may take as long as the driver likes.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from typing import Final

from kvfs import limits
from kvfs.errors import DeviceFailed, DeviceMissing, KvfsError, LimitExceeded

VARIABLE: Final = "KVFS_LIBNVML"
_SONAME: Final = "libnvidia-ml.so.1"
_INIT: Final = "nvmlInit_v2"
_SHUT_DOWN: Final = "nvmlShutdown"
_HANDLE: Final = "nvmlDeviceGetHandleByUUID"
_LIST: Final = "nvmlDeviceGetComputeRunningProcesses_v3"
_LIST_MPS: Final = "nvmlDeviceGetMPSComputeRunningProcesses_v3"
_ERROR_TEXT: Final = "nvmlErrorString"
_INSUFFICIENT_SIZE: Final = 7


class _Process(ctypes.Structure):
    """nvmlProcessInfo_v2_t, which both lists are of."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class Nvml:
    """Hold the library: `path`, the environment's KVFS_LIBNVML, or the system's; opened by the first call."""

    def __init__(self, path: str | None = None) -> None:
        self._path = path
        self._library: ctypes.CDLL | None = None
        self._initialised = False

    def __call__(self, device: str) -> frozenset[int]:
        """List the processes that have a context of their own on the device with this UUID, by the pids that the driver
        has for them. Those that share one through MPS are left out: it may outlive them. Raises DeviceMissing,
        DeviceFailed, LimitExceeded."""
        if self._library is None:
            self._library = self._open()
        try:
            if not self._initialised:
                self._call(self._library, _INIT)
                self._initialised = True
            return self._list(self._library, device)
        except KvfsError:
            self._shut_down(self._library)
            raise

    def _open(self) -> ctypes.CDLL:
        where = self._path or os.environ.get(VARIABLE) or _SONAME
        try:
            library = ctypes.CDLL(where)
        except OSError as error:
            raise DeviceMissing(f"NVML: {error}") from None
        for name in (_INIT, _SHUT_DOWN, _HANDLE, _LIST, _LIST_MPS, _ERROR_TEXT):
            if not hasattr(library, name):
                raise DeviceMissing(f"NVML: {where} has no {name}")
        getattr(library, _ERROR_TEXT).restype = ctypes.c_char_p
        return library

    def _list(self, library: ctypes.CDLL, device: str) -> frozenset[int]:
        handle = ctypes.c_void_p()
        self._call(library, _HANDLE, device.encode(), ctypes.byref(handle))
        return self._pids(library, _LIST, handle) - self._pids(library, _LIST_MPS, handle)

    def _pids(self, library: ctypes.CDLL, name: str, handle: ctypes.c_void_p) -> frozenset[int]:
        count = ctypes.c_uint(limits.HBM_LISTED)
        table = (_Process * limits.HBM_LISTED)()  # 21 KiB: no list that may have grown between two calls
        result = getattr(library, name)(handle, ctypes.byref(count), table)
        if result == _INSUFFICIENT_SIZE:
            raise LimitExceeded(f"{name}: {count.value} processes, {limits.HBM_LISTED} are looked at")
        self._check(library, name, result)
        return frozenset(each.pid for each in table[: count.value])

    def _call(self, library: ctypes.CDLL, name: str, *arguments: object) -> None:
        self._check(library, name, getattr(library, name)(*arguments))

    def _check(self, library: ctypes.CDLL, name: str, result: int) -> None:
        """Raise DeviceFailed with the library's own words for a result that is an error."""
        if result:
            text: bytes | None = getattr(library, _ERROR_TEXT)(result)
            raise DeviceFailed(f"{name}: {(text or b'?').decode(errors='replace')} ({result})")

    def _shut_down(self, library: ctypes.CDLL) -> None:
        if self._initialised:
            self._initialised = False
            with suppress(KvfsError):  # what the caller hears of is what came before
                self._call(library, _SHUT_DOWN)
