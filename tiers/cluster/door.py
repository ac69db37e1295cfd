"""The cluster as the service sees it: there, or not.

Responsibility: load the parts where settings ask for them. A machine alone imports none of them.
Concurrency: the service's trio thread.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Protocol

import trio

from kvfs.config.settings import ClusterSettings
from kvfs.errors import ConfigError
from tiers.model.objects import Bucket
from tiers.store.store import Store

_CLUSTER, _DIRECTORY = "tiers.remote.cluster", "tiers.cluster.directory"


class RunningCluster(Protocol):
    """Serves and fetches blocks; see `tiers.remote.cluster`."""

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        """Serve and fetch blocks until cancelled; started once connections are accepted. Raises ConfigError."""

    async def fetch(
        self, bucket: Bucket, digests: Sequence[bytes], *, uid: int, hint: str | None, urgent: bool
    ) -> int:
        """Fetch blocks that are not here; return how many are here then. Raises InvalidRequest of an unknown hint."""

    async def match(self, bucket: Bucket, digests: Sequence[bytes]) -> dict[str, int]:
        """Return by machine how many blocks it has, from the first on; those that have none are left out."""

    async def copy(self, to: str, buckets: Sequence[Bucket]) -> dict[str, Any]:
        """Begin to copy the blocks of buckets to another machine; describe the task. Raises InvalidRequest, Busy,
        Unsupported."""

    async def move(self, to: str, buckets: Sequence[Bucket]) -> dict[str, Any]:
        """Begin to move the blocks of caches among buckets to another machine; describe the task. Raises as `copy`."""

    async def drain(self) -> dict[str, Any]:
        """Begin to bring what this machine alone has to others; describe the task. Raises Busy, Unsupported."""

    async def cancel(self, kind: str) -> dict[str, Any]:
        """Cancel the task of a kind; describe it. Raises NotFound where none is under way."""

    def renew_certificates(self) -> None:
        """Read the files of certificates again, for connections made from then on; log what cannot be used."""

    def status(self) -> dict[str, Any]:
        """Describe peers, the directory and what was served, as JSON values."""


def make_cluster(settings: ClusterSettings, store: Store, numa_nodes: Sequence[int]) -> RunningCluster | None:
    """Return the cluster that settings ask for, still to be run; None without one. `numa_nodes`: where DRAM is, if that
    is known. Raises ConfigError."""
    if settings.listen is None and not settings.peers and settings.directory is None:
        return None
    directory = None if settings.directory is None else _make_directory(settings, store)
    module = importlib.import_module(_CLUSTER)
    cluster: RunningCluster = module.Cluster(settings, store, directory=directory, numa_nodes=numa_nodes)
    return cluster


def _make_directory(settings: ClusterSettings, store: Store) -> Any:
    try:
        module = importlib.import_module(_DIRECTORY)
    except ImportError as error:
        raise ConfigError(f"[cluster] directory needs {error.name}: pip install 'kvfs[cluster]'") from None
    return module.Directory(settings, store)
