"""The common part of all connectors: a link to the store that outlives outages, digests of keys, names of weights.

Responsibility: `Link` opens blocks of namespaces and keeps an engine from waiting for a service that does not answer:
after a failure reads go on in place, writes are skipped, and a thread of the link tries until the service answers
again. The first namespace is tried with a block of the link's own, and one line of the log says what came of it.
`LowerTiers` leaves out what is below DRAM while it does not come up.
`digest_keys` makes prefix hashes for engines with keys of their own. `weights_revision` names weights by their files.

Invariants: a failure of the store is a miss or a skipped write, logged once per outage, never an exception in an
engine's step. Concurrency: any thread; the prober is one daemon thread, alive during an outage only.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, TypeVar

from kvfs.client import Client, connect
from kvfs.client.blocks import Blocks
from kvfs.errors import DeadlinePassed, InvalidRequest, KvfsError, NotFound, ProtocolError, SessionClosed
from kvfs.keys import key_at
from kvfs.limits import (
    CONNECTOR_MATCH_S,
    CONNECTOR_RETRY_S,
    CONNECTOR_TIMEOUT_S,
    CONNECTOR_TRIAL_BLOCKS,
    WEIGHTS_SAMPLE_BYTES,
    WEIGHTS_SAMPLES,
)
from kvfs.namespaces import DIGEST_BYTES, Namespace

T = TypeVar("T")
log = logging.getLogger("kvfs.connectors")

ADDRESS_VARIABLE: Final = "KVFS_ADDRESS"
DEFAULT_ADDRESS: Final = "/mnt/kvfs"
VLLM_LOG: Final = "vllm.kvfs"
"""A logger below vLLM's own, which shows INFO; others' settings do not reach `kvfs.connectors`."""
SGLANG_LOG: Final = "sglang.srt.kvfs"
"""A logger below SGLang's own, so that what shows those shows this, also where a file of the user's configures them."""
_OUTAGES: Final = (SessionClosed, DeadlinePassed, ProtocolError, OSError)
_PLACES: Final = frozenset(("_name_or_path", "name_or_path"))
_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def address_of(config: Mapping[str, Any] | None, name: str = "address") -> str:
    """Return the service's address: from the engine's configuration, else KVFS_ADDRESS, else /mnt/kvfs."""
    given = (config or {}).get(name) or os.environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS
    if not isinstance(given, str):
        raise InvalidRequest(f"{name} is {given!r}, not the path of a mount or a socket")
    return given


class Link:
    """Open blocks of namespaces behind one address."""

    def __init__(
        self, address: str, *, name: str, log: logging.Logger = log, timeout_s: float = CONNECTOR_TIMEOUT_S
    ) -> None:
        """Note the address; `open` connects, and never raises for a service that does not answer. `log` is one that the
        engine shows."""
        self._address, self._name, self._log, self._timeout_s = address, name, log, timeout_s
        self._lock = threading.Lock()
        """Held by who connects, for as long as the service takes to answer."""
        self._ending = threading.Lock()
        """Of several threads whose calls fail one begins the outage, and none waits for who connects."""
        self._client: Client | None = None
        self._opened: dict[bytes, Blocks] = {}
        """By the digest of the namespace; read without the lock, so that nobody waits for the prober."""
        self._wanted: dict[bytes, Namespace] = {}
        self._up = threading.Event()
        self._up.set()
        self._closed = threading.Event()
        self._tried = False
        """Whether a block went to the store and back, or failed to while the service answered."""
        self.published: dict[str, str] = {}
        """`topic`, `endpoint` and `replay` of the service's KV events, and `peer`, where other machines read its
        blocks, once it was asked; without what it does not have."""

    @property
    def is_up(self) -> bool:
        """Return whether the service answered when it was last asked."""
        return self._up.is_set()

    def wait_up(self, timeout_s: float) -> bool:
        """Wait for the end of an outage; return whether the service answers."""
        return self._up.wait(timeout_s)

    @property
    def quota_bytes(self) -> int:
        """Return how many bytes the store lets one user write at once; 0 while it is not known."""
        client = self._client
        return 0 if client is None else int(client.details["quota"]["bytes"])

    def open(self, namespace: Namespace) -> Blocks | None:
        """Return the blocks of a namespace; None during an outage, while the background tries again.

        Raises InvalidNamespace, AccessDenied and other errors that do not pass.
        """
        found = self._opened.get(namespace.digest)
        if found is not None:
            return found
        self._wanted[namespace.digest] = namespace
        if not self.is_up:
            return None
        try:
            opened = self._connect(namespace)
        except _OUTAGES as error:
            self.failed(error)
            return None
        self._try(namespace, opened)
        return opened

    def blocks(self, namespace: Namespace) -> Blocks | None:
        """Return the blocks of a namespace, if they are open; never waits."""
        return self._opened.get(namespace.digest)

    def attempt(self, do: Callable[[], T], otherwise: T) -> T:
        """Call the store; return `otherwise` where it fails. Raises InvalidRequest for a wrong argument."""
        try:
            return do()
        except InvalidRequest:
            raise
        except (KvfsError, OSError) as error:
            self.failed(error)
            return otherwise

    def failed(self, error: BaseException) -> bool:
        """Log a failure; begin an outage, which is logged once, where the service does not answer. Return whether it is
        one."""
        if not isinstance(error, _OUTAGES):
            self._log.warning("%s: %s", self._name, error)
            return False
        with self._ending:
            if not self.is_up or self._closed.is_set():
                return True
            self._up.clear()
        self._log.warning(
            "%s: the store at %s failed, going on without: %s", self._name, self._address, error
        )
        threading.Thread(target=self._probe, daemon=True, name="kvfs-probe").start()
        return True

    def clear(self, namespace: Namespace) -> int:
        """Remove all blocks of a namespace; return how many, 0 during an outage."""
        client, blocks = self._client, self._opened.get(namespace.digest)
        if client is None or blocks is None:
            return 0
        return self.attempt(lambda: clear(client, blocks), 0)

    def close(self) -> None:
        """Close the client and end the background thread; nothing is opened any more."""
        self._closed.set()
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()  # and the blocks, which it knows as long as they are held here
        self._opened.clear()

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

    def _try(self, namespace: Namespace, blocks: Blocks) -> None:
        """Store, read and remove a block of the first namespace, and log where blocks are kept. Once a link."""
        with self._lock:
            client = self._client
            if self._tried or client is None:
                return
            self._tried = True
        line = self.attempt(lambda: try_store(client, namespace, blocks), "")
        if not line:
            self._tried = self.is_up
            return
        self.published = self.attempt(lambda: _published(client), {})
        say(self._log, f"{self._name}: the store at {self._address} {line}")

    def _probe(self) -> None:
        while not self._closed.wait(CONNECTOR_RETRY_S):
            try:
                connect(self._address, timeout_s=self._timeout_s, client=self._name).close()
                for namespace in list(self._wanted.values()):
                    self._try(namespace, self._connect(namespace))
            except (KvfsError, OSError):
                continue
            self._log.warning("%s: the store at %s answers again", self._name, self._address)
            self._up.set()
            return


def try_store(client: Client, namespace: Namespace, blocks: Blocks) -> str:
    """Store a block of random bytes, read and remove it; return which store, and where it keeps the namespace's blocks.

    Raises NotFound where other bytes come back, KvfsError, OSError.
    """
    began_s = time.monotonic()
    key, data, place = secrets.token_bytes(DIGEST_BYTES), secrets.token_bytes(64), bytearray(64)
    blocks.put([key], [data], [None])
    sizes = blocks.get_into([key], [place])
    blocks.remove([key])
    if sizes != [len(data)] or place != data:
        raise NotFound(f"a block that was stored in bucket {blocks.bucket} is not read back")
    return (
        f"({client.store_id.hex()[:8]}) works, a block went there and back in "
        f"{1e3 * (time.monotonic() - began_s):.1f} ms: "
        f"namespace {namespace.digest.hex()} ({namespace.model}), bucket {blocks.bucket}"
    )


def say(log: logging.Logger, line: str) -> None:
    """Log a line at INFO; write it to stderr in a program that has set up no logging, where Python drops INFO."""
    if log.hasHandlers():
        log.info("%s", line)
    else:
        print(line, file=sys.stderr, flush=True)


class LowerTiers:
    """Leave out blocks below DRAM, from a load of them that failed until one of them has come up again.

    Concurrency: one thread; blocks are brought up by the client's.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._missed = b""
        """Blocks that did not come up, which are tried again; empty while the lower tiers work."""
        self._trial: Future[int] | None = None
        self._next_s = 0.0

    def failed(self, blocks: Blocks, keys: bytes) -> None:
        """Note a load that failed; blocks that were evicted meanwhile, or are in DRAM, say nothing of lower tiers."""
        if self._missed:
            return
        below = blocks.below_dram(keys, timeout_s=CONNECTOR_MATCH_S)
        missed = [key_at(keys, i) for i, is_below in enumerate(below) if is_below]
        self._missed = b"".join(missed[:CONNECTOR_TRIAL_BLOCKS])
        if self._missed:
            log.warning("blocks below DRAM do not come up: only what is in DRAM is read until they do")
            self._try(blocks)

    def each_readable(self, blocks: Blocks, keys: bytes) -> list[bool]:
        """Return for each block whether it is there and can be read."""
        there = blocks.exists(keys, timeout_s=CONNECTOR_MATCH_S)
        if self._missed:
            self._look(blocks)
        if not self._missed:
            return there
        below = blocks.below_dram(keys, timeout_s=CONNECTOR_MATCH_S)
        return [is_there and not is_below for is_there, is_below in zip(there, below, strict=True)]

    def readable(self, blocks: Blocks, keys: bytes) -> int:
        """Return how many of these blocks, all of which are there, can be read from the first on."""
        if self._missed:
            self._look(blocks)
        if not self._missed:
            return len(keys) // DIGEST_BYTES
        below = blocks.below_dram(keys, timeout_s=CONNECTOR_MATCH_S)
        return below.index(True) if True in below else len(below)

    def _look(self, blocks: Blocks) -> None:
        """See what came of the trial; begin the next one, where none came up."""
        if self._trial is not None and self._trial.done():
            trial, self._trial = self._trial, None
            if trial.exception() is None and trial.result() > 0:
                self._missed = b""
                log.warning("blocks below DRAM come up again")
        elif self._trial is None and self._clock() >= self._next_s:
            if any(blocks.below_dram(self._missed, timeout_s=CONNECTOR_MATCH_S)):
                self._try(blocks)
            else:  # they are gone: nothing is known of lower tiers any more
                self._missed = b""

    def _try(self, blocks: Blocks) -> None:
        self._next_s = self._clock() + CONNECTOR_RETRY_S
        self._trial = blocks.prefetch(self._missed, timeout_s=CONNECTOR_TIMEOUT_S)


def _published(client: Client) -> dict[str, str]:
    """Return where a service publishes KV events and where other machines read its blocks, as far as it does."""
    status = client.status()
    found = {
        **status.get("events", {}).get("published", {}),
        "peer": status.get("cluster", {}).get("address"),
    }
    return {name: found[name] for name in ("topic", "endpoint", "replay", "peer") if found.get(name)}


def clear(client: Client, blocks: Blocks) -> int:
    """Remove all blocks of a bucket; return how many. Raises KvfsError, OSError."""

    def digests() -> list[bytes]:
        names = client.list(f"{blocks.bucket}/kv/")
        return [bytes.fromhex(entry.key.rpartition("/")[2]) for entry in names if entry.is_block]

    try:
        found = digests()
    except SessionClosed:  # unlike blocks, a client begins no new session by itself
        client.reconnect()
        found = digests()
    return blocks.remove(found)


def memory_at(pointers: Sequence[int], sizes: Sequence[int]) -> list[Any]:
    """Return buffers for memory given by addresses and sizes, without empty pieces."""
    return [
        (ctypes.c_ubyte * size).from_address(at) for at, size in zip(pointers, sizes, strict=True) if size > 0
    ]


# --- keys ----------------------------------------------------------------------------------------------------
def string_namespace(kind: str, extra: Mapping[str, str] | None = None) -> Namespace:
    """Return the namespace of an engine with its own keys, of the form `kind`; `extra` is what else decides bytes."""
    return Namespace.of_one_device(
        model=kind,
        revision="1",
        dtype="int8",
        layout="LTC",
        block_tokens=1,
        extra={"keys": "sha256", **(extra or {})},
    )


def new_epoch() -> str:
    """Return a new name for an engine's weights, which no other engine has."""
    return f"epoch {secrets.token_hex(16)}"


def digest_keys(namespace: Namespace, keys: Sequence[bytes], epoch: str = "") -> list[bytes]:
    """Return, for each key, the first 16 bytes of SHA-256 over the namespace's digest, the epoch and the key."""
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
    """Return `digest_keys` of strings, in UTF-8."""
    return digest_keys(namespace, [string.encode("utf-8", "surrogateescape") for string in strings], epoch)


def chain_parents(keys: Sequence[bytes], before: bytes | None = None) -> list[bytes | None]:
    """Return the parents of consecutive blocks, the first of which follows `before`."""
    return [before, *keys[:-1]] if keys else []


# --- weights -------------------------------------------------------------------------------------------------
def weights_revision(directory: Path, further: Sequence[str] = ()) -> str:
    """Return a name for the weights in a directory, which copies of them share and other weights do not.

    It digests each file's name and size and samples of its bytes: reading 100 GB would take minutes, and training
    changes nearly all bytes. Files with `further` endings count, too. Raises InvalidRequest without weights.
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
    """Return a digest of a model's configuration (transformers' PretrainedConfig) without its path."""
    found = json.loads(config.to_json_string())
    return hashlib.sha256(json.dumps(_without_names(found), sort_keys=True).encode()).hexdigest()[:32]


def _without_names(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_names(each) for name, each in value.items() if name not in _PLACES}
    return [_without_names(each) for each in value] if isinstance(value, list) else value


def architecture_of(config: Any) -> str:
    """Return the kind of model of a configuration; its name is only a path."""
    return str((getattr(config, "architectures", None) or [None])[0] or config.model_type)


def model_directory(model: str, hub_revision: str | None = None) -> Path:
    """Return the directory of a model, given by path or by its name in the hub's cache. Raises InvalidRequest."""
    if model and Path(model).is_dir():
        return Path(model)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=hub_revision, local_files_only=True))
    except (ImportError, OSError, ValueError) as error:
        raise InvalidRequest(
            f"the weights of {model!r} are unknown ({error}): set revision in the connector's configuration"
        ) from None


def model_revision(model: str, given: object = None, hub_revision: str | None = None) -> str:
    """Return the revision that is configured, else the name of the weights in the model's directory. Raises
    InvalidRequest without either."""
    return str(given) if given else weights_revision(model_directory(model, hub_revision))
