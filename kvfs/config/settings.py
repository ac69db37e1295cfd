"""Every setting of the service, its default and its bounds, as frozen values (`kvfs.config.load` reads them).

Invariants: nothing is guessed or ignored; settings never change while the service runs.

Concurrency: pure values; read once at start-up.
"""

from __future__ import annotations

import os
import re
import tempfile
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from kvfs.config.capacities import NumaNodes, block_devices_bytes, default_dram_bytes, default_slots
from kvfs.config.credentials import Credential
from kvfs.config.disk_room import default_nvme_bytes
from kvfs.config.server_urls import BY_NAME
from kvfs.config.sizes import format_size, parse_size
from kvfs.config.url_settings import (
    AskedUrls,
    ConductorUrl,
    DirectoryUrl,
    Endpoint,
    EngineUrl,
    EngineUrls,
    check_engines_once,
    host_and_port,
)
from kvfs.errors import InvalidRequest
from kvfs.limits import (
    DEFAULT_COLD_BYTES,
    DEFAULT_COLD_TIMEOUT_S,
    DEFAULT_REMOTE_MATCH_S,
    DEFAULT_SCRUB_BYTES_S,
    HBM_SEGMENT_BYTES,
    MAX_ACCESS_KEY_BYTES,
    MAX_COLD_PREFIX_BYTES,
    MAX_COLD_TIMEOUT_S,
    MAX_CONDUCTOR_INSTANCES,
    MAX_CONDUCTOR_TOKENS,
    MAX_CREDENTIALS,
    MAX_GATEWAY_CONNECTIONS,
    MAX_GATEWAY_WORKERS,
    MAX_HBM_DEVICES,
    MAX_NVME_DEVICES,
    MAX_PEERS,
    MAX_PROXY_REQUESTS,
    MAX_PROXY_TOKENS,
    MAX_REMOTE_MATCH_S,
    MAX_SCRUB_BYTES_S,
    MAX_SLOTS,
    MAX_SOCKET_PATH_BYTES,
    MIN_COLD_BYTES,
    MIN_DRAM_BYTES,
    MIN_NVME_BYTES,
    MIN_SECRET_KEY_BYTES,
    MIN_SLOTS,
)
from kvfs.paths import check_bucket
from kvfs.system.linux import may_mount

MountMode = Literal["auto", "passthrough", "native", "plain", "off"]
DeviceIo = Literal["auto", "io_uring", "threads"]
Backing = Literal["auto", "tmpfs", "directory"]
EvictionPolicyName = Literal["default", "lru-leaf"]
ColdAdmission = Literal["read", "all"]
HandOver = Literal["store", "nixl", "mooncake", "sglang"]
LogLevel = Literal["debug", "info", "warning", "error"]
RoutingPolicy = Literal[
    "default", "kvcache-centric", "local", "longest-prefix", "least-queued", "round-robin", "random"
]
QueueDiscipline = Literal["fcfs", "length-aware"]
AdmissionMode = Literal["none", "early", "default"]


def _size(value: Any) -> int:
    try:
        return parse_size(value)
    except ValueError as error:
        raise PydanticCustomError("size", "{reason}", {"reason": str(error)}) from None


def _not_empty(value: Any) -> Any:
    if value == "":
        raise PydanticCustomError("path", "a path cannot be empty")
    return value


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path.expanduser()))


def _short_enough(path: Path) -> Path:
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_PATH_BYTES:
        raise PydanticCustomError(
            "socket",
            "{length} bytes long: at most {limit}",
            {"length": length, "limit": MAX_SOCKET_PATH_BYTES},
        )
    return path


def _bucket_name(name: str) -> str:
    try:
        check_bucket(name.encode())
    except InvalidRequest as error:
        raise PydanticCustomError("bucket", "{reason}", {"reason": str(error)}) from None
    return name


Size = Annotated[int, BeforeValidator(_size)]


def _one_or_more(value: object) -> object:
    return [value] if isinstance(value, str | Path) else value


AbsolutePath = Annotated[Path, BeforeValidator(_not_empty), AfterValidator(_absolute)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StoreSettings(_Section):
    """[store]: where the data is, and the order of eviction."""

    data: AbsolutePath = Path("/var/lib/kvfs")
    """The directory of the lock, the index and the DRAM tier's mount point."""
    policy: EvictionPolicyName = "default"
    """The order of eviction from a full tier; docs/policies.md has both orders and their measured curves."""


class DramSettings(_Section):
    """[dram]: the tier of slots on tmpfs."""

    capacity: Annotated[Size, Field(ge=MIN_DRAM_BYTES)] = Field(default_factory=default_dram_bytes)
    """Bytes; the tier's hard limit."""
    slots: Annotated[int, Field(ge=MIN_SLOTS, le=MAX_SLOTS)] | None = None
    """Most objects at once. None: one for each 64 KiB of the capacity, at least 131,072."""
    keep: bool = True
    """Whether a clean stop keeps the objects in memory for the next start; a kill always does."""
    backing: Backing = "auto"
    """What holds the bytes; `auto` takes a private tmpfs where the service may mount one."""
    numa_nodes: NumaNodes = ()
    """Nodes whose memory a tmpfs takes while they have room, pages in turn. None: that of whoever writes."""

    @property
    def max_slots(self) -> int:
        """Return the slots that are configured, else as many as the capacity asks for."""
        return default_slots(self.capacity) if self.slots is None else self.slots

    @property
    def on_disk(self) -> bool:
        """Return whether the tier will lie in a plain directory."""
        return not (self.numa_nodes or may_mount()) if self.backing == "auto" else self.backing == "directory"


def _no_devices(value: object) -> object:
    return () if value == "auto" else _one_or_more(value)


def _device_uuid(text: str) -> str:
    if not re.fullmatch(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", text):
        raise PydanticCustomError("device", 'must be "auto" or UUIDs of GPUs, as nvidia-smi -L prints them')
    return text


class HbmSettings(_Section):
    """[hbm]: GPU memory in which processes of one uid share blocks (docs/hbm.md)."""

    capacity: Annotated[Size, Field(ge=HBM_SEGMENT_BYTES)] | None = None
    """Bytes of each device, taken as blocks come. None: no tier."""
    device: Annotated[
        tuple[Annotated[str, AfterValidator(_device_uuid)], ...],
        BeforeValidator(_no_devices),
        Field(max_length=MAX_HBM_DEVICES),
    ] = ()
    """UUIDs of GPUs. None, or "auto": all whose memory processes can share."""


class NvmeSettings(_Section):
    """[nvme]: the tier of segments on local drives."""

    capacity: Size | None = None
    """Bytes, preallocated; 0: no tier. None: as at an earlier start, else a quarter of the free space, up to 4 GiB."""
    path: AbsolutePath | None = None
    """Directory of the segment files, and of what is written beside segments. None: `nvme` in the data directory."""
    device: Annotated[
        tuple[AbsolutePath, ...], BeforeValidator(_one_or_more), Field(max_length=MAX_NVME_DEVICES)
    ] = ()
    """Block devices, whole, in place of segment files: a path, or a list of paths."""
    segment: Size | None = None
    """Bytes of one segment, fixed when the first is made. None: a 64th of the capacity."""
    io: DeviceIo = "auto"
    """`auto` takes io_uring where the kernel allows it."""
    trim: bool = False
    """Whether a freed segment's blocks are punched out of its file, for filesystems that notify the drive (TRIM)."""
    scrub_rate: Annotated[Size, Field(le=MAX_SCRUB_BYTES_S)] = DEFAULT_SCRUB_BYTES_S
    """Bytes that the scrub verifies in a second, on NVMe and in DRAM; 0: none."""

    @field_validator("capacity")
    @classmethod
    def _off_or_enough(cls, value: int | None) -> int | None:
        if value is not None and 0 < value < MIN_NVME_BYTES:
            raise PydanticCustomError(
                "nvme", "0 (off) or at least {least}", {"least": format_size(MIN_NVME_BYTES)}
            )
        return value


class ColdSettings(_Section):
    """[cold]: copies of cached objects in an S3 bucket elsewhere (docs/cold.md)."""

    bucket: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{3,255}$")] | None = None
    """None: no cold tier."""
    prefix: Annotated[str, Field(max_length=MAX_COLD_PREFIX_BYTES, pattern=r"^([A-Za-z0-9._-]+/)*$")] = (
        "kvfs/"
    )
    """The prefix of this store alone; it ends in a slash."""
    endpoint: Annotated[str, Field(pattern=r"^https?://[^/\s]+/?$")] | None = None
    """URL of the server. None: AWS."""
    region: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,64}$")] = "us-east-1"
    access_key: Annotated[str, Field(min_length=1, max_length=MAX_ACCESS_KEY_BYTES)] | None = None
    secret_key: SecretStr | None = None
    """With `access_key`, or neither: then boto3 searches its usual places (environment, files, instance role)."""
    profile: str | None = None
    """The profile in boto3's configuration files."""
    capacity: Annotated[Size, Field(ge=MIN_COLD_BYTES)] = DEFAULT_COLD_BYTES
    """The most bytes in the bucket."""
    admit: ColdAdmission = "read"
    """`read`: objects that were read at least once are copied there; `all`: every sealed object."""
    timeout_s: Annotated[float, Field(gt=0, le=MAX_COLD_TIMEOUT_S)] = DEFAULT_COLD_TIMEOUT_S
    """The longest silence within an answer of the server."""
    take_over: bool = False
    """Whether to take over the objects under the prefix of another store, which exists no more."""

    @model_validator(mode="after")
    def _whole(self) -> ColdSettings:
        if (self.access_key is None) != (self.secret_key is None):
            raise PydanticCustomError("cold", "access_key and secret_key: both or none")
        if self.bucket is None and self.model_fields_set:
            raise PydanticCustomError("cold", "there is no bucket")
        return self


class MountSettings(_Section):
    """[mount]: the mount and its mode."""

    path: AbsolutePath = Path("/mnt/kvfs")
    mode: MountMode = "auto"
    """`auto` takes the fastest that works here: passthrough, then native, then plain. `off`: there is no mount."""
    allow_other: bool = True
    """Whether users besides the service's own see the mount; without root they never do."""


class SessionSettings(_Section):
    """[session]: the socket of local clients (docs/sessions.md)."""

    socket: Annotated[AbsolutePath, AfterValidator(_short_enough)] | None = None
    """None: see `Settings.socket_path`."""
    group: str | None = None
    """Its members read the whole tier directly. None: `kvfs` where that group exists, else the service's own."""
    quota: Annotated[Size, Field(ge=0)] | None = None
    """Bytes that one uid may hold of replaced objects. None: half the DRAM capacity."""


class S3Settings(_Section):
    """[s3]: the S3 endpoint (docs/s3.md)."""

    region: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,64}$")] = "us-east-1"
    """The region in clients' signatures."""
    domains: tuple[Annotated[str, Field(pattern=r"^[a-z0-9.-]{1,253}$")], ...] = ()
    """`BUCKET.DOMAIN` of one of these means the bucket; the domain itself is path style."""
    default_bucket: Annotated[str, AfterValidator(_bucket_name)] | None = None
    """The bucket of a host outside the domains that is neither an IP address nor `localhost`. None: path style."""
    credentials: Annotated[tuple[Credential, ...], Field(max_length=MAX_CREDENTIALS)] = ()
    listen: Endpoint | None = None
    """`HOST:PORT` of the S3 endpoint. None: the service starts none."""
    workers: Annotated[int, Field(ge=1, le=MAX_GATEWAY_WORKERS)] = 1
    """Processes that share the port."""
    certificate: AbsolutePath | None = None
    key: AbsolutePath | None = None
    """PEM files; with both, the endpoint serves TLS. SIGHUP reads them, and the credentials, again."""
    admin: Endpoint | None = None
    """`HOST:PORT` of /healthz, /metrics and the page of the first worker; the next ports are the other workers'."""
    opaque_etags: tuple[str, ...] = ()
    """Globs of buckets whose objects get an opaque ETag: MD5 halves the speed of uploads."""
    large_buckets: tuple[str, ...] = ()
    """Globs of buckets that, created over S3, take files larger than DRAM on the mount; needs an NVMe tier."""
    upload_expiry_s: Annotated[float, Field(ge=60)] = 7 * 86400.0
    """Multipart uploads are removed this long after their begin and their last part."""
    connections: Annotated[int, Field(ge=1, le=MAX_GATEWAY_CONNECTIONS)] = MAX_GATEWAY_CONNECTIONS
    """Connections of one worker; when all are taken, silent ones are closed for new ones."""

    @model_validator(mode="after")
    def _both_or_none(self) -> S3Settings:
        if (self.certificate is None) != (self.key is None):
            raise PydanticCustomError("tls", "certificate and key are given together or not at all")
        return self


class EventSettings(_Section):
    """[events]: KV events over ZeroMQ in vLLM's form (docs/events.md); off by default."""

    publish: str | None = None
    """The endpoint of the store's events: `tcp://*:5557` is bound, a concrete address connected to."""
    replay: str | None = None
    """The endpoint, bound, where subscribers ask for batches that they missed."""
    topic: str = "kvfs"
    engines: str | None = None
    """The endpoint, bound, where engines' publishers connect, each with a topic of its own."""
    engine_replays: dict[str, str] = Field(default_factory=dict)
    """By topic, the endpoint where that engine answers requests for replays."""

    @field_validator("replay")
    @classmethod
    def _of_what(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("publish") is None:
            raise PydanticCustomError("events", "there is nothing to replay without publish")
        return value


class ConductorSettings(_Section):
    """[conductor]: which instance answers which request (docs/conductor.md)."""

    listen: Endpoint = "127.0.0.1:9200"
    tokens: Annotated[tuple[SecretStr, ...], Field(max_length=MAX_CONDUCTOR_TOKENS)] = ()
    """Bearer tokens of those who may ask. None: everybody who reaches `listen`, which must be a loopback address."""
    certificate: AbsolutePath | None = None
    key: AbsolutePath | None = None
    """PEM files; with both, the door serves TLS. SIGHUP reads them again."""
    connections: Annotated[int, Field(ge=1, le=MAX_GATEWAY_CONNECTIONS)] = MAX_GATEWAY_CONNECTIONS
    events: str = "tcp://127.0.0.1:5561"
    """The endpoint, bound, where engines' and services' publishers connect, each with a topic of its own."""
    instances: AbsolutePath | None = None
    """A JSON file of instances, which is read again when it changes."""
    engines: AskedUrls = ()
    """Engines that are asked what they are, as http://HOST:PORT or https://HOST:PORT, or as dns+http://NAME:PORT all
    that a name in DNS stands for; their roles are what they say."""
    prefill: AskedUrls = ()
    decode: AskedUrls = ()
    """Engines that are asked, for one of both."""
    engine_token: SecretStr = SecretStr("")
    """The engines' `--api-key`, which asking them for their models needs."""
    authorities: AbsolutePath | None = None
    """PEM file of who may sign the certificates of https:// engines. None: whom the system trusts."""
    policy: RoutingPolicy = "default"
    queue: QueueDiscipline = "fcfs"
    admission: AdmissionMode = "default"
    ttft_slo_s: Annotated[float, Field(gt=0)] = float("inf")
    tbt_slo_s: Annotated[float, Field(gt=0)] = float("inf")
    """Limits of requests that bring none of their own."""
    cost_model: str = "llama3-8b"
    cost_device: str = "h100-sxm"
    cost_devices: Annotated[int, Field(ge=1, le=1024)] = 1
    """Where costs begin: a model of the table on so many devices of an instance (docs/scheduling.md)."""
    fitted: bool = True
    """Whether costs follow what is observed."""
    transfers: bool = False
    """Whether instances load blocks from the stores of other nodes."""
    copies: bool = False
    """Whether nodes are to fetch hot prefixes from each other."""
    relabel: bool = False
    """Whether instances labelled prefill or decode change sides with the load."""

    @property
    def asked(self) -> dict[str, Literal["prefill", "decode"] | None]:
        """Return the roles of the engines that are asked what they are; None: what they say."""
        found: dict[str, Literal["prefill", "decode"] | None] = dict.fromkeys(self.engines)
        return found | dict.fromkeys(self.prefill, "prefill") | dict.fromkeys(self.decode, "decode")

    @model_validator(mode="after")
    def _safe(self) -> ConductorSettings:
        check_engines_once(engines=self.engines, prefill=self.prefill, decode=self.decode)
        if (self.certificate is None) != (self.key is None):
            raise PydanticCustomError("tls", "certificate and key are given together or not at all")
        if not self.tokens and host_and_port(self.listen)[0] not in ("127.0.0.1", "::1", "localhost"):
            raise PydanticCustomError("tokens", "listen is no loopback address, so tokens are needed")
        if any(len(token.get_secret_value()) < MIN_SECRET_KEY_BYTES for token in self.tokens):
            raise PydanticCustomError(
                "tokens", "a token has fewer than {least} characters", {"least": MIN_SECRET_KEY_BYTES}
            )
        return self


class ProxySettings(_Section):
    """[proxy]: the front for clients of OpenAI's interface (docs/proxy.md)."""

    listen: Endpoint = "127.0.0.1:8000"
    engines: EngineUrls = ()
    """Engines that prefill and decode, as http://HOST:PORT or https://HOST:PORT; with conduct as dns+http://NAME:PORT,
    too."""
    prefill: EngineUrls = ()
    decode: EngineUrls = ()
    """Engines for one of both."""
    hand_over: HandOver = "store"
    """How a prefilled prompt reaches the decode engine."""
    bootstraps: dict[EngineUrl, Endpoint] = Field(default_factory=dict)
    """By URL of a prefill engine, its bootstrap server for mooncake and sglang, `:PORT` at its own host. None: there,
    port 8998."""
    tokens: Annotated[tuple[SecretStr, ...], Field(max_length=MAX_PROXY_TOKENS)] = ()
    """Bearer tokens of clients. None: what clients send goes on to the engines."""
    certificate: AbsolutePath | None = None
    key: AbsolutePath | None = None
    """PEM files; with both, clients speak TLS. SIGHUP reads them again."""
    connections: Annotated[int, Field(ge=1, le=MAX_PROXY_REQUESTS)] = MAX_PROXY_REQUESTS
    conduct: bool = False
    """Whether a Conductor in the process asks these engines what they are, and routes."""
    conductor: ConductorUrl = ""
    """The URL of the Conductor that routes. Empty: one in the process if it has engines or instances, else load."""
    conductor_token: SecretStr = SecretStr("")
    """One of that Conductor's tokens; $KVFS_CONDUCTOR_TOKEN is another way to give it."""
    authorities: AbsolutePath | None = None
    """PEM file of who may sign the certificates of https:// engines and Conductor. None: whom the system trusts."""

    @model_validator(mode="after")
    def _safe(self) -> ProxySettings:
        if self.conduct and self.conductor:
            raise PydanticCustomError(
                "conduct", "conduct has a Conductor in the process: leave out conductor"
            )
        check_engines_once(engines=self.engines, prefill=self.prefill, decode=self.decode)
        engines = (*self.engines, *self.prefill, *self.decode)
        named = next((url for url in engines if url.startswith(BY_NAME)), None)
        if named is not None and not self.conduct:
            raise PydanticCustomError(
                "engines", "{url}: a Conductor resolves names, so this needs conduct", {"url": named}
            )
        if self.conduct and len(engines) > MAX_CONDUCTOR_INSTANCES:
            raise PydanticCustomError(
                "conduct",
                "with conduct there are at most {limit} engines",
                {"limit": MAX_CONDUCTOR_INSTANCES},
            )
        if (self.certificate is None) != (self.key is None):
            raise PydanticCustomError("tls", "certificate and key are given together or not at all")
        if any(len(token.get_secret_value()) < MIN_SECRET_KEY_BYTES for token in self.tokens):
            raise PydanticCustomError(
                "tokens", "a token has fewer than {least} characters", {"least": MIN_SECRET_KEY_BYTES}
            )
        return self


class ClusterSettings(_Section):
    """[cluster]: blocks of other machines (docs/cluster.md)."""

    listen: Endpoint | None = None
    """`HOST:PORT` where other machines read this one's blocks. None: they do not."""
    peers: Annotated[tuple[Endpoint, ...], Field(max_length=MAX_PEERS)] = ()
    """Machines that are asked for blocks; this one's own address may be among them."""
    secret_file: AbsolutePath | None = None
    """The same bytes on all machines; only the service's user may read the file."""
    certificate: AbsolutePath | None = None
    key: AbsolutePath | None = None
    authorities: AbsolutePath | None = None
    """PEM files; with all three, machines speak TLS and show their certificates, which `authorities` have signed. Only
    the service's user may read the key. SIGHUP reads them again."""
    transport: Literal["tcp", "ucx"] = "tcp"
    """What blocks' bytes come by from machines that have it, too; the rest of them by TCP."""
    match_wait_s: Annotated[float, Field(gt=0, le=MAX_REMOTE_MATCH_S)] = DEFAULT_REMOTE_MATCH_S
    """How long the directory, or all peers, may take to say who has what."""
    mount_fetches: bool = False
    """Whether a look-up of a block's path on the mount asks other machines where it is not here."""
    directory: DirectoryUrl | None = None
    """`redis://HOST:PORT/DB` of the server that says who has which block. None: all peers are asked."""
    address: Endpoint | None = None
    """`HOST:PORT` under which other machines reach `listen`. None: `listen` itself."""
    conductor: ConductorUrl = ""
    """The URL of the Conductor that orders copies of hot prefixes. Empty: none is asked."""
    conductor_token: SecretStr = SecretStr("")
    """One of that Conductor's tokens."""
    conductor_topic: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")] = "kvfs"
    """The name of this node there: the topic of its events."""

    @property
    def advertised(self) -> str | None:
        """Return where others read this machine's blocks; None where they do not."""
        return None if self.listen is None else self.address or self.listen

    @model_validator(mode="after")
    def _has_secret(self) -> ClusterSettings:
        if (self.listen is not None or self.peers or self.directory is not None) and self.secret_file is None:
            raise PydanticCustomError("cluster", "listen, peers and directory need a secret_file")
        if len({path is None for path in (self.certificate, self.key, self.authorities)}) > 1:
            raise PydanticCustomError(
                "tls", "certificate, key and authorities are given together or not at all"
            )
        if self.transport == "ucx" and self.certificate is not None:
            raise PydanticCustomError("cluster", "'ucx' is not encrypted, and excludes a certificate")
        wanted = "conductor" if self.conductor else "mount_fetches" if self.mount_fetches else ""
        if wanted and not self.peers and self.directory is None:
            text = "{wanted} needs peers or a directory to fetch from"
            raise PydanticCustomError("cluster", text, {"wanted": wanted})
        if self.directory is not None and self.advertised is not None:
            host, port = host_and_port(self.advertised)
            if host in ("", "0.0.0.0", "::") or port == 0:
                raise PydanticCustomError(
                    "cluster", "other machines cannot reach `listen` by that: set address"
                )
        if len(set(self.peers)) < len(self.peers):
            raise PydanticCustomError("cluster", "a peer is named twice")
        return self


class LogSettings(_Section):
    """[log]: how much is logged."""

    level: LogLevel = "info"


class Settings(_Section):
    """All sections, validated."""

    store: StoreSettings = StoreSettings()
    hbm: HbmSettings = HbmSettings()
    dram: DramSettings = Field(default_factory=DramSettings)
    nvme: NvmeSettings = NvmeSettings()
    cold: ColdSettings = ColdSettings()
    mount: MountSettings = MountSettings()
    session: SessionSettings = SessionSettings()
    s3: S3Settings = S3Settings()
    events: EventSettings = EventSettings()
    conductor: ConductorSettings = ConductorSettings()
    proxy: ProxySettings = ProxySettings()
    cluster: ClusterSettings = ClusterSettings()
    log: LogSettings = LogSettings()
    _file: Path | None = PrivateAttr(default=None)

    @property
    def file(self) -> Path | None:
        """Return the file of the settings; None without one."""
        return self._file

    def of_file(self, file: Path | None) -> Settings:
        """Return the same settings, read from `file`."""
        self._file = file
        return self

    @property
    def mountpoint(self) -> Path | None:
        """Return where the mount is; None where there is to be none."""
        return None if self.mount.mode == "off" else self.mount.path

    @property
    def nvme_path(self) -> Path:
        """Return the directory of the NVMe tier's segments; `nvme` below the data directory by default."""
        return self.nvme.path or self.store.data / "nvme"

    @property
    def nvme_bytes(self) -> int:
        """Return the NVMe tier's capacity, 0 without one. Raises ConfigError for a device that is not there."""
        if self.nvme.device:
            return block_devices_bytes(self.nvme.device)
        if self.nvme.capacity is not None:
            return self.nvme.capacity
        return default_nvme_bytes(self.nvme_path)

    @property
    def socket_path(self) -> Path:
        """Return `[session] socket`, else `kvfs.sock` in the data directory (in /run or /tmp if it is too deep)."""
        if self.session.socket is not None:
            return self.session.socket
        path = self.store.data / "kvfs.sock"
        if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
            return path
        runtime = os.environ.get("XDG_RUNTIME_DIR") or (
            "/run" if os.geteuid() == 0 else tempfile.gettempdir()
        )
        return Path(runtime) / f"kvfs-{sha256(os.fsencode(self.store.data)).hexdigest()[:16]}.sock"
