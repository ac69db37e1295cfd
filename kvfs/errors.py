"""The one exception tree, with the form of each error at every door.

Responsibility: every failure that kvfs reports on purpose is a `KvfsError`, and carries the errno for the mount, the S3
error code for the gateway (`gateway.protocol.errors` has its status), and its log level. Nothing else maps errors.

Invariants: a message names the offending thing and, where there is one, its limit. Native code reports
`-errno`; only `from_errno` turns one into an exception, and `from_device_errno` for the files of a storage device.
`from_cuda` does it for results of the CUDA driver.
"""

from __future__ import annotations

import errno
import logging
import os
from typing import ClassVar, Final


class KvfsError(Exception):
    """Base of every error that kvfs raises on purpose."""

    errno: ClassVar[int] = errno.EIO
    s3_code: ClassVar[str] = "InternalError"
    log_level: ClassVar[int] = logging.ERROR


class NotFound(KvfsError):
    """No sealed object, bucket or directory has this name or key."""

    errno = errno.ENOENT
    s3_code = "NoSuchKey"
    log_level = logging.DEBUG


class BucketNotFound(NotFound):
    """No bucket has this name."""

    s3_code = "NoSuchBucket"


class NoAttribute(NotFound):
    """The extended attribute does not exist on this object."""

    errno = errno.ENODATA


class Exists(KvfsError):
    """The name is taken and the caller asked not to replace it."""

    errno = errno.EEXIST
    s3_code = "PreconditionFailed"
    log_level = logging.DEBUG


class NotEmpty(KvfsError):
    """A directory or bucket still holds names."""

    errno = errno.ENOTEMPTY
    s3_code = "BucketNotEmpty"
    log_level = logging.DEBUG


class IsDirectory(KvfsError):
    """The name is a directory and the call is for files."""

    errno = errno.EISDIR
    s3_code = "InvalidRequest"
    log_level = logging.DEBUG


class NotDirectory(KvfsError):
    """A component of the path is a file."""

    errno = errno.ENOTDIR
    s3_code = "InvalidRequest"
    log_level = logging.DEBUG


class IsLink(KvfsError):
    """The name is a symbolic link, which the store never follows; the call is for the bytes of an object."""

    errno = errno.ELOOP
    s3_code = "InvalidRequest"
    log_level = logging.DEBUG


class InvalidRequest(KvfsError):
    """An argument is malformed; the message says which and why."""

    errno = errno.EINVAL
    s3_code = "InvalidArgument"
    log_level = logging.INFO


class InvalidNamespace(InvalidRequest):
    """A namespace description is incomplete, unknown or not canonical."""


class WrongChecksum(InvalidRequest):
    """The bytes of a draft do not have the checksum that their writer gave; they were not sealed."""

    errno = errno.EBADMSG
    s3_code = "BadDigest"


class NameTooLong(InvalidRequest):
    """A bucket name, key or path component is over its limit."""

    errno = errno.ENAMETOOLONG
    s3_code = "KeyTooLongError"


class LimitExceeded(InvalidRequest):
    """A count or size in a request is over a limit named in `kvfs.limits`."""

    errno = errno.E2BIG


class ObjectTooLarge(KvfsError):
    """The object is over the largest size that its tier accepts."""

    errno = errno.EFBIG
    s3_code = "EntityTooLarge"
    log_level = logging.WARNING


class NoSpace(KvfsError):
    """The tier is full and nothing more can be evicted now."""

    errno = errno.ENOSPC
    s3_code = "InsufficientStorage"
    log_level = logging.WARNING


class Busy(KvfsError):
    """The object is there, and there is no room to serve it now: the same call succeeds later."""

    errno = errno.EAGAIN
    s3_code = "SlowDown"
    log_level = logging.DEBUG


class NotReady(KvfsError):
    """What is asked for is not known yet: somebody who may have it has not answered since the start."""

    errno = errno.EAGAIN
    s3_code = "ServiceUnavailable"
    log_level = logging.DEBUG


class QuotaExceeded(KvfsError):
    """A uid holds more bytes or drafts than it may."""

    errno = errno.EDQUOT
    s3_code = "QuotaExceeded"
    log_level = logging.WARNING


class AccessDenied(KvfsError):
    """The caller's uid has no right to this object or bucket."""

    errno = errno.EACCES
    s3_code = "AccessDenied"
    log_level = logging.INFO


class NotPermitted(KvfsError):
    """A cache does not offer the operation, or only to the service's own user."""

    errno = errno.EPERM
    s3_code = "AccessDenied"
    log_level = logging.INFO


class Unsupported(KvfsError):
    """The operation is not offered here; the message names what is."""

    errno = errno.EOPNOTSUPP
    s3_code = "NotImplemented"
    log_level = logging.INFO


class WriterActive(KvfsError):
    """A draft has a writable descriptor or mapping somewhere, so it cannot be sealed yet."""

    errno = errno.EBUSY
    s3_code = "OperationAborted"
    log_level = logging.DEBUG


class TextBusy(KvfsError):
    """Sealed bytes were to be written through a descriptor for reading them."""

    errno = errno.ETXTBSY
    s3_code = "OperationAborted"
    log_level = logging.DEBUG


class Superseded(KvfsError):
    """The slot, draft or node has been replaced since it was looked up: look it up again."""

    errno = errno.ESTALE
    s3_code = "OperationAborted"
    log_level = logging.DEBUG


class CrossDevice(KvfsError):
    """A rename that cannot be one transaction; the caller copies instead."""

    errno = errno.EXDEV
    s3_code = "InvalidRequest"
    log_level = logging.DEBUG


class Corrupt(KvfsError):
    """Bytes do not match their checksum or format; they were not served."""


class DeadlinePassed(KvfsError):
    """A bounded wait ended without its event."""

    errno = errno.ETIMEDOUT
    s3_code = "RequestTimeout"
    log_level = logging.WARNING


class SessionClosed(KvfsError):
    """The service ended the session, or is not running."""

    errno = errno.ENOTCONN
    s3_code = "ServiceUnavailable"
    log_level = logging.WARNING


class ProtocolError(KvfsError):
    """A peer broke the session protocol; the connection is closed."""

    errno = errno.EPROTO
    s3_code = "InvalidRequest"
    log_level = logging.WARNING


class ConfigError(KvfsError):
    """A configuration file or flag is wrong; the message names the key and its limit."""

    errno = errno.EINVAL


class StoreLocked(KvfsError):
    """Another service already runs on this data directory."""

    errno = errno.EBUSY


class FormatMismatch(KvfsError):
    """Data on disk or in DRAM was written by another format version or another store."""

    errno = errno.EPROTONOSUPPORT


class DeviceMissing(KvfsError):
    """A device, driver or right that a tier or transport needs is not on this machine."""

    errno = errno.ENODEV
    s3_code = "ServiceUnavailable"


class DeviceFailed(KvfsError):
    """A storage device or GPU refused or lost an operation; the bytes there are unknown."""

    errno = errno.EREMOTEIO


class DeviceAway(DeviceFailed):
    """A storage device does not answer; what only it has cannot be read or made durable meanwhile."""

    errno = errno.EHOSTDOWN
    s3_code = "ServiceUnavailable"
    log_level = logging.WARNING


class ContextLost(DeviceFailed):
    """A GPU's context met an error that stays: no call of this process on the device succeeds any more."""


class OutOfResources(KvfsError):
    """The machine, or a limit of this process, lacks memory or descriptors; nothing is wrong with data."""

    errno = errno.ENOMEM
    s3_code = "ServiceUnavailable"


class TierUnreachable(KvfsError):
    """A tier on another machine does not answer, or refuses access; its objects are misses meanwhile."""

    errno = errno.EHOSTUNREACH
    s3_code = "ServiceUnavailable"
    log_level = logging.WARNING


SHORTAGES = frozenset(
    (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EFBIG, errno.ENOSPC, errno.EDQUOT)
)


def is_shortage(error: BaseException) -> bool:
    """Return whether an error says that the machine, or a limit of this process, had too little of something."""
    if isinstance(error, (MemoryError, NoSpace, OutOfResources)):
        return True
    return error.errno in SHORTAGES if isinstance(error, OSError) else str(error) == _NO_THREAD


def find_shortage(error: BaseException) -> BaseException | None:
    """Return an error that is a shortage, or the first one in a group; None without one."""
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, map(find_shortage, error.exceptions)), None)
    return error if is_shortage(error) else None


_NO_THREAD: Final = "can't start new thread"
"""Python's RuntimeError where the kernel refuses one."""


_FROM_ERRNO: dict[int, type[KvfsError]] = {
    errno.ENOENT: NotFound,
    errno.ENODATA: NoAttribute,
    errno.EEXIST: Exists,
    errno.ENOTEMPTY: NotEmpty,
    errno.EISDIR: IsDirectory,
    errno.ENOTDIR: NotDirectory,
    errno.ELOOP: IsLink,
    errno.EXDEV: CrossDevice,
    errno.ENOSPC: NoSpace,
    errno.EDQUOT: QuotaExceeded,
    errno.EACCES: AccessDenied,
    errno.EPERM: NotPermitted,
    errno.EBUSY: WriterActive,
    errno.ESTALE: Superseded,
    errno.EFBIG: ObjectTooLarge,
    errno.EINVAL: InvalidRequest,
    errno.E2BIG: LimitExceeded,
    errno.ENAMETOOLONG: NameTooLong,
    errno.EOPNOTSUPP: Unsupported,
    errno.ETIMEDOUT: DeadlinePassed,
    errno.EPROTO: ProtocolError,
    errno.EPROTONOSUPPORT: FormatMismatch,
    errno.ENODEV: DeviceMissing,
    errno.EIO: Corrupt,
    errno.EBADMSG: WrongChecksum,
    errno.EAGAIN: Busy,
    errno.EHOSTDOWN: DeviceAway,
    errno.EREMOTEIO: DeviceFailed,
}

_FROM_DEVICE_ERRNO: dict[int, type[KvfsError]] = {
    errno.ENOENT: NotFound,
    errno.EEXIST: Exists,
    errno.ENOSPC: NoSpace,
    errno.EDQUOT: NoSpace,
    errno.EINVAL: InvalidRequest,
}
"""Errors of the service's own files: EDQUOT is no uid's quota, and EIO is no wrong checksum."""


def from_errno(code: int, what: str) -> KvfsError | OSError:
    """Return the exception for an errno (either sign) of native code about `what`; an OSError where kvfs has none."""
    number = abs(code)
    kind = _FROM_ERRNO.get(number)
    if kind is None:
        return OSError(number, os.strerror(number), what)
    return kind(f"{what}: {os.strerror(number)}")


def status_error(status: int, what: str) -> KvfsError:
    """Return the kvfs error for a status of the session protocol about `what`."""
    error = from_errno(status, what)
    return error if isinstance(error, KvfsError) else KvfsError(f"{what}: {os.strerror(status)}")


def block_error(status: int, digest: bytes) -> KvfsError:
    """Return the kvfs error for a status of the block `digest`, which is EINVAL for a key that no block may have."""
    if status == errno.EINVAL and not any(digest[:8]):
        return InvalidRequest(f"prefix hash {digest.hex()}: eight zero bytes begin the keys of named objects")
    return status_error(status, digest.hex())


def from_device_errno(code: int, what: str) -> KvfsError:
    """Return the exception for an errno (either sign) of an operation on a device's file."""
    number = abs(code)
    kind = _FROM_DEVICE_ERRNO.get(number, DeviceFailed)
    return kind(f"{what}: {os.strerror(number)}")


_FROM_CUDA: dict[int, type[KvfsError]] = {
    1: InvalidRequest,  # CUDA_ERROR_INVALID_VALUE
    2: OutOfResources,  # CUDA_ERROR_OUT_OF_MEMORY
    3: DeviceMissing,  # CUDA_ERROR_NOT_INITIALIZED
    100: DeviceMissing,  # CUDA_ERROR_NO_DEVICE
    101: DeviceMissing,  # CUDA_ERROR_INVALID_DEVICE
    400: InvalidRequest,  # CUDA_ERROR_INVALID_HANDLE
    500: NotFound,  # CUDA_ERROR_NOT_FOUND
    801: Unsupported,  # CUDA_ERROR_NOT_SUPPORTED
    803: DeviceMissing,  # CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
}
_CONTEXT_LOST: Final = frozenset((214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719))
"""ECC and NVLink errors that cannot be corrected, a fault or timeout of a kernel or copy, a destroyed context: cuda.h
says of each that the process must end to use the device again."""


def from_cuda(result: int, name: str, what: str) -> KvfsError:
    """Return the exception for a result of the CUDA driver, by the driver's own name for it, of the call `what`."""
    kind = ContextLost if result in _CONTEXT_LOST else _FROM_CUDA.get(result, DeviceFailed)
    return kind(f"{what}: {name}")
