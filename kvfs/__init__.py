"""kvfs: a tiered store for the KV cache of large language models.

`connect` begins a session with a running service; every failure is a `KvfsError`. These names are the public interface.
The package imports neither the service's dependencies (FUSE, LMDB, trio) nor torch.
"""

from kvfs._native.blocks.pieces import Scatter
from kvfs._native.blocks.reader import View
from kvfs._native.blocks.writer import Draft
from kvfs.client import Client, connect
from kvfs.client.blocks import Blocks
from kvfs.client.layers import Loading
from kvfs.client.results import Bucket, Entry
from kvfs.errors import (
    AccessDenied,
    BucketNotFound,
    ConfigError,
    Corrupt,
    CrossDevice,
    DeadlinePassed,
    DeviceFailed,
    DeviceMissing,
    Exists,
    FormatMismatch,
    InvalidNamespace,
    InvalidRequest,
    IsDirectory,
    KvfsError,
    LimitExceeded,
    NameTooLong,
    NoAttribute,
    NoSpace,
    NotDirectory,
    NotEmpty,
    NotFound,
    NotPermitted,
    ObjectTooLarge,
    ProtocolError,
    QuotaExceeded,
    SessionClosed,
    StoreLocked,
    Superseded,
    Unsupported,
    WriterActive,
)
from kvfs.keys import prefix_hashes, tail_hash
from kvfs.namespaces import Namespace

__all__ = [
    "AccessDenied",
    "Blocks",
    "Bucket",
    "BucketNotFound",
    "Client",
    "ConfigError",
    "Corrupt",
    "CrossDevice",
    "DeadlinePassed",
    "DeviceFailed",
    "DeviceMissing",
    "Draft",
    "Entry",
    "Exists",
    "FormatMismatch",
    "InvalidNamespace",
    "InvalidRequest",
    "IsDirectory",
    "KvfsError",
    "LimitExceeded",
    "Loading",
    "NameTooLong",
    "Namespace",
    "NoAttribute",
    "NoSpace",
    "NotDirectory",
    "NotEmpty",
    "NotFound",
    "NotPermitted",
    "ObjectTooLarge",
    "ProtocolError",
    "QuotaExceeded",
    "Scatter",
    "SessionClosed",
    "StoreLocked",
    "Superseded",
    "Unsupported",
    "View",
    "WriterActive",
    "connect",
    "prefix_hashes",
    "tail_hash",
]
