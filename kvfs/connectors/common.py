"""What all connectors share: a link to the store that outlives outages, digests of engines' keys, names of weights.

Responsibility: `Link` opens blocks of namespaces and keeps an engine from waiting for a service that is not there:
after a failure reads go on in place, writes are skipped, and a thread of the link's own tries until the service answers
again. `digest_keys` are prefix hashes for engines with keys of their own. `weights_revision` names weights by what
they are.

Invariants: a failure of the store is a miss or a store that did not happen, said once per outage, never an exception in
an engine's step. Concurrency: any thread; the prober is one daemon thread, alive during an outage only.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from kvfs.blocks import Blocks
from kvfs.client import Client, connect
from kvfs.errors import DeadlinePassed, InvalidRequest, KvfsError, ProtocolError, SessionClosed
from kvfs.limits import CONNECTOR_RETRY_S, CONNECTOR_TIMEOUT_S, WEIGHTS_SAMPLE_BYTES, WEIGHTS_SAMPLES
from kvfs.namespaces import DIGEST_BYTES, Namespace

T = TypeVar("T")
log = logging.getLogger("kvfs.connectors")

ADDRESS_VARIABLE: Final = "KVFS_ADDRESS"
DEFAULT_ADDRESS: Final = "/mnt/kvfs"
_OUTAGES: Final = (SessionClosed, DeadlinePassed, ProtocolError, OSError)
_PLACES: Final = frozenset(("_name_or_path", "name_or_path"))
_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def address_of(config: Mapping[str, Any] | None, name: str = "address") -> str:
    """Where the service is: what the engine's configuration says, else KVFS_ADDRESS, else /mnt/kvfs."""
    given = (config or {}).get(name) or os.environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS
    if not isinstance(given, str):
        raise InvalidRequest(f"{name} is {given!r}, not the path of a mount or a socket")
    return given


class Link:
    """Blocks of namespaces behind one address."""

    def __init__(self, address: str, *, name: str, timeout_s: float = CONNECTOR_TIMEOUT_S) -> None:
        """Never raises for a service that is not there: the first use finds that out again."""
        self._address, self._name, self._timeout_s = address, name, timeout_s
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._opened: dict[bytes, Blocks] = {}
        """By the digest of their namespace; read without the lock, so that nobody waits for the prober."""
        self._wanted: dict[bytes, Namespace] = {}
        self._down = threading.Event()
        self._closed = threading.Event()

    @property
    def is_up(self) -> bool:
        """Whether the service answered when it was last asked: what needs it is not worth a try otherwise."""
        return not self._down.is_set()

    def open(self, namespace: Namespace) -> Blocks | None:
        """The blocks of a namespace; None while they cannot be had, which is tried again in the background.

        Raises InvalidNamespace, AccessDenied and other errors that waiting does not cure.
        """
        found = self._opened.get(namespace.digest)
        if found is not None:
            return found
        self._wanted[namespace.digest] = namespace
        if self._down.is_set():
            return None
        try:
            return self._connect(namespace)
        except _OUTAGES as error:
            self.failed(error)
            return None

    def blocks(self, namespace: Namespace) -> Blocks | None:
        """What `open` gave or the background did since; never waits."""
        return self._opened.get(namespace.digest)

    def attempt(self, do: Callable[[], T], otherwise: T) -> T:
        """The result of a call to the store, or `otherwise` where the store fails. A wrong argument still raises."""
        try:
            return do()
        except InvalidRequest:
            raise
        except (KvfsError, OSError) as error:
            self.failed(error)
            return otherwise

    def failed(self, error: BaseException) -> None:
        """Where the service does not answer, say so once and look for it in the background; else (no space, ...) say
        what went wrong."""
        if not isinstance(error, _OUTAGES):
            log.warning("%s: %s", self._name, error)
            return
        with self._lock:
            if self._down.is_set() or self._closed.is_set():
                return
            self._down.set()
        log.warning("%s: the store at %s failed, going on without: %s", self._name, self._address, error)
        threading.Thread(target=self._probe, daemon=True, name="kvfs-probe").start()

    def clear(self, namespace: Namespace) -> int:
        """Remove all blocks of a namespace; how many there were. 0 while the service is not there."""
        client, blocks = self._client, self._opened.get(namespace.digest)
        if client is None or blocks is None:
            return 0
        return self.attempt(lambda: clear(client, blocks), 0)

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            client, self._client = self._client, None
            self._opened.clear()
        if client is not None:
            client.close()

    def _connect(self, namespace: Namespace) -> Blocks:
        with self._lock:
            if self._closed.is_set():
                raise SessionClosed("this connector is closed")
            found = self._opened.get(namespace.digest)
            if found is not None:
                return found
            if self._client is None:
                self._client = connect(self._address, timeout_s=self._timeout_s, client=self._name)
            opened = self._client.blocks(namespace, timeout_s=self._timeout_s)
            self._opened[namespace.digest] = opened
            return opened

    def _probe(self) -> None:
        while not self._closed.wait(CONNECTOR_RETRY_S):
            try:
                connect(self._address, timeout_s=self._timeout_s, client=self._name).close()
                for namespace in list(self._wanted.values()):
                    self._connect(namespace)
            except (KvfsError, OSError):
                continue
            log.warning("%s: the store at %s answers again", self._name, self._address)
            self._down.clear()
            return


def clear(client: Client, blocks: Blocks) -> int:
    """Remove all blocks of a bucket; how many there were. Raises what the store does."""

    def digests() -> list[bytes]:
        names = client.list(f"{blocks.bucket}/kv/")
        return [bytes.fromhex(entry.key.rpartition("/")[2]) for entry in names if entry.is_block]

    try:
        found = digests()
    except SessionClosed:  # blocks begin lost sessions anew, the client's own is begun by whoever uses it
        client.reconnect()
        found = digests()
    return blocks.remove(found)


def memory_at(pointers: Sequence[int], sizes: Sequence[int]) -> list[Any]:
    """Memory that an engine names by address, as buffers; empty pieces are left out."""
    return [
        (ctypes.c_ubyte * size).from_address(at) for at, size in zip(pointers, sizes, strict=True) if size > 0
    ]


# --- keys ----------------------------------------------------------------------------------------------------
def string_namespace(kind: str, extra: Mapping[str, str] | None = None) -> Namespace:
    """The namespace of an engine that has keys of its own, which say what decides the bytes besides `extra`.

    `kind` names the form of those keys.
    """
    return Namespace(
        model=kind,
        revision="1",
        dtype="int8",
        layout="LTC",
        block_tokens=1,
        tensor_shards=1,
        tensor_rank=0,
        pipeline_shards=1,
        pipeline_rank=0,
        lora="",
        salt="",
        hash="sha256",
        extra={"keys": "sha256", **(extra or {})},
    )


def new_epoch() -> str:
    """A name for the weights that an engine has from now on, which no other engine has."""
    return f"epoch {secrets.token_hex(16)}"


def digest_keys(namespace: Namespace, keys: Sequence[bytes], epoch: str = "") -> list[bytes]:
    """The first 16 bytes of SHA-256 over the namespace's digest, the epoch, and each of an engine's own keys."""
    start = hashlib.sha256(namespace.digest)
    if epoch:
        start.update(hashlib.sha256(epoch.encode()).digest())
    digests = []
    for key in keys:
        digest = start.copy()
        digest.update(key)
        digests.append(digest.digest()[:DIGEST_BYTES])
    return digests


def string_keys(namespace: Namespace, strings: Sequence[str], epoch: str = "") -> list[bytes]:
    """The same of strings, in UTF-8."""
    return digest_keys(namespace, [string.encode("utf-8", "surrogateescape") for string in strings], epoch)


def chain_parents(keys: Sequence[bytes], before: bytes | None = None) -> list[bytes | None]:
    """Each key's parent where every block follows the one before it."""
    return [before, *keys[:-1]] if keys else []


# --- weights -------------------------------------------------------------------------------------------------
def weights_revision(directory: Path, further: Sequence[str] = ()) -> str:
    """A name for the weights in a directory that another copy of them shares and other weights do not.

    A digest of each file's name and size and of samples of its bytes: reading 100 GB would take minutes, and training
    changes nearly all of them. Files with `further` endings count, too. Raises InvalidRequest without weights.
    """
    wanted = (*_WEIGHTS, *further)
    files = sorted(path for path in directory.iterdir() if path.suffix in wanted and path.is_file())
    if not any(path.suffix in _WEIGHTS for path in files):
        raise InvalidRequest(f"{directory}: no weights ({', '.join(_WEIGHTS)}); say which revision they are")
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        step = max(size // WEIGHTS_SAMPLES, WEIGHTS_SAMPLE_BYTES)
        with path.open("rb") as file:
            for at in [*range(0, size, step), max(size - WEIGHTS_SAMPLE_BYTES, 0)]:
                file.seek(at)
                digest.update(file.read(WEIGHTS_SAMPLE_BYTES))
    return f"weights-{digest.hexdigest()[:32]}"


def config_digest(config: Any) -> str:
    """A digest of a model's configuration (transformers' PretrainedConfig) that does not say where it lies."""
    found = json.loads(config.to_json_string())
    return hashlib.sha256(json.dumps(_without_names(found), sort_keys=True).encode()).hexdigest()[:32]


def _without_names(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_names(each) for name, each in value.items() if name not in _PLACES}
    return [_without_names(each) for each in value] if isinstance(value, list) else value


def architecture_of(config: Any) -> str:
    """What kind of model a configuration is of: its name is where somebody put it, and says nothing of its bytes."""
    return str((getattr(config, "architectures", None) or [None])[0] or config.model_type)


def model_directory(model: str, hub_revision: str | None = None) -> Path:
    """Where a model's files are: it is a directory, or a name in the hub's cache. Raises InvalidRequest."""
    if model and Path(model).is_dir():
        return Path(model)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=hub_revision, local_files_only=True))
    except (ImportError, OSError, ValueError) as error:
        raise InvalidRequest(
            f"which weights of {model!r} these are is unknown ({error}): set revision in the connector's configuration"
        ) from None


def model_revision(model: str, given: object = None, hub_revision: str | None = None) -> str:
    """Which weights: what the configuration says, else what the files of a directory or of the hub's cache are.

    Raises InvalidRequest where neither says.
    """
    return str(given) if given else weights_revision(model_directory(model, hub_revision))
