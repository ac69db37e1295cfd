"""kvfs: a tiered store for the KV cache of large language models.

`connect` begins a session with a running service; everything that goes wrong is a `KvfsError`. These names
are the public interface. The package imports neither the service's dependencies (FUSE, LMDB, trio) nor
torch.
"""

from kvfs._native.pieces import Scatter
from kvfs._native.reader import View
from kvfs._native.writer import Draft
from kvfs.blocks import Blocks
from kvfs.client import Block, Client, NamespaceHandle, connect
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
from kvfs.layers import Loading
from kvfs.namespaces import Namespace
from kvfs.results import Bucket, Entry

__all__ = [
    "AccessDenied",
    "Block",
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
    "NamespaceHandle",
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
