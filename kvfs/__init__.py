"""kvfs: a tiered store for the KV cache of large language models.

`connect` begins a session with a running service; everything that goes wrong is a `KvfsError`. These names
are the public interface. The package imports neither the service's dependencies (FUSE, LMDB, trio) nor
torch.
"""

from kvfs.client import Block, Client, NamespaceHandle, connect
from kvfs.errors import (
    AccessDenied,
    BucketNotFound,
    ConfigError,
    Corrupt,
    CrossDevice,
    DeadlinePassed,
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
from kvfs.results import Bucket, Entry

__all__ = [
    "AccessDenied",
    "Block",
    "Bucket",
    "BucketNotFound",
    "Client",
    "ConfigError",
    "Corrupt",
    "CrossDevice",
    "DeadlinePassed",
    "DeviceMissing",
    "Entry",
    "Exists",
    "FormatMismatch",
    "InvalidNamespace",
    "InvalidRequest",
    "IsDirectory",
    "KvfsError",
    "LimitExceeded",
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
    "SessionClosed",
    "StoreLocked",
    "Superseded",
    "Unsupported",
    "WriterActive",
    "connect",
    "prefix_hashes",
    "tail_hash",
]
