"""Configuration: a TOML file and command-line flags, validated into frozen settings.

Responsibility: every setting of the service, its default and its bounds. A flag wins over the file, the file
over the default. A wrong or unknown key is a ConfigError that names the key, the value and the limit; nothing
is guessed or ignored. Settings never change while the service runs.

Concurrency: pure values; read once at start-up.
"""

from __future__ import annotations

import os
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
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
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from kvfs.credentials import Credential
from kvfs.errors import ConfigError, InvalidRequest
from kvfs.limits import (
    DEFAULT_COLD_BYTES,
    DEFAULT_COLD_TIMEOUT_S,
    DEFAULT_SCRUB_BYTES_S,
    DEFAULT_SLOTS,
    DRAM_SHARE_OF_AVAILABLE,
    KIB,
    MAX_ACCESS_KEY_BYTES,
    MAX_COLD_PREFIX_BYTES,
    MAX_COLD_TIMEOUT_S,
    MAX_CREDENTIALS,
    MAX_DEFAULT_NVME_BYTES,
    MAX_GATEWAY_CONNECTIONS,
    MAX_GATEWAY_WORKERS,
    MAX_SCRUB_BYTES_S,
    MAX_SLOTS,
    MAX_SOCKET_PATH_BYTES,
    MIB,
    MIN_COLD_BYTES,
    MIN_DRAM_BYTES,
    MIN_NVME_BYTES,
    MIN_SLOTS,
    NVME_SHARE_OF_FREE,
)
from kvfs.paths import check_bucket
from kvfs.sizes import format_size, parse_size

MountMode = Literal["auto", "passthrough", "native", "plain"]
DeviceIo = Literal["auto", "io_uring", "threads"]
Backing = Literal["auto", "tmpfs", "directory"]
EvictionPolicyName = Literal["default", "lru-leaf"]
ColdAdmission = Literal["read", "all"]
LogLevel = Literal["debug", "info", "warning", "error"]


def default_dram_bytes() -> int:
    """A quarter of the memory that is free for use now, within this process's memory cgroup; whole MiB."""
    available = min(_available_bytes(), _cgroup_room_bytes())
    return max(available // DRAM_SHARE_OF_AVAILABLE // MIB * MIB, MIN_DRAM_BYTES)


def default_nvme_bytes(directory: Path) -> int:
    """What the segment files there take already, else a share of the filesystem's free space; 0 if that is little."""
    taken = sum(file.stat().st_size for file in directory.glob("*.seg"))
    if taken:
        return taken
    while not directory.exists():
        directory = directory.parent
    found = os.statvfs(directory)
    share = found.f_bavail * found.f_frsize // NVME_SHARE_OF_FREE
    return min(share, MAX_DEFAULT_NVME_BYTES) if share >= MIN_NVME_BYTES else 0


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * KIB
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup_room_bytes() -> int:
    """What the version 2 memory cgroup leaves: tmpfs pages are charged to it, whatever MemAvailable says."""
    try:
        groups = Path("/proc/self/cgroup").read_text().splitlines()
        path = next(line[len("0::/") :] for line in groups if line.startswith("0::/"))
        group = Path("/sys/fs/cgroup") / path
        most = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except (OSError, StopIteration, ValueError):
        return 1 << 62
    return 1 << 62 if most == "max" else max(int(most) - used, 0)


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


def _host_and_port(text: str) -> str:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535 or (":" in host and not host.startswith("[")):
        raise PydanticCustomError("endpoint", "must be HOST:PORT, such as 127.0.0.1:9000 or [::]:9000")
    return text


def host_and_port(text: str) -> tuple[str, int]:
    """`HOST:PORT` of a valid setting, taken apart; an empty host means every address."""
    host, _, port = text.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


Size = Annotated[int, BeforeValidator(_size)]
AbsolutePath = Annotated[Path, BeforeValidator(_not_empty), AfterValidator(_absolute)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StoreSettings(_Section):
    """[store]"""

    data: AbsolutePath = Path("/var/lib/kvfs")
    """Directory of the lock, the index and the DRAM tier's mount point."""
    policy: EvictionPolicyName = "default"
    """What leaves a full tier first; docs/policies.md has both orders and their measured curves."""


class DramSettings(_Section):
    """[dram]"""

    capacity: Annotated[Size, Field(ge=MIN_DRAM_BYTES)] = Field(default_factory=default_dram_bytes)
    """Bytes; the tier's hard limit."""
    slots: Annotated[int, Field(ge=MIN_SLOTS, le=MAX_SLOTS)] = DEFAULT_SLOTS
    """Most objects at once."""
    keep: bool = True
    """Whether a clean stop leaves the objects in memory for the next start; a kill always does."""
    backing: Backing = "auto"
    """What holds the bytes; `auto` takes a private tmpfs where the right to mount is there."""


class NvmeSettings(_Section):
    """[nvme]"""

    capacity: Size | None = None
    """Bytes, preallocated; 0: no NVMe tier. None: what an earlier start took, else a share of what is free."""
    path: AbsolutePath | None = None
    """Directory of the segment files. None: `nvme` in the data directory."""
    segment: Size | None = None
    """Bytes of one segment file, fixed when the first is made. None: a 64th of the capacity."""
    io: DeviceIo = "auto"
    """`auto` takes io_uring where the kernel allows it."""
    trim: bool = False
    """Whether what a freed segment held is punched out of its file, for filesystems that tell the drive (TRIM)."""
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
    """Of this store alone; it ends in a slash."""
    endpoint: Annotated[str, Field(pattern=r"^https?://[^/\s]+/?$")] | None = None
    """URL of the server. None: AWS."""
    region: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,64}$")] = "us-east-1"
    access_key: Annotated[str, Field(min_length=1, max_length=MAX_ACCESS_KEY_BYTES)] | None = None
    secret_key: SecretStr | None = None
    """Both or none: then boto3 looks for credentials where it always does (environment, files, instance role)."""
    profile: str | None = None
    """Of boto3's configuration files."""
    capacity: Annotated[Size, Field(ge=MIN_COLD_BYTES)] = DEFAULT_COLD_BYTES
    """Bytes in the bucket, never passed."""
    admit: ColdAdmission = "read"
    """`read`: what was read at least once goes there; `all`: everything that is sealed."""
    timeout_s: Annotated[float, Field(gt=0, le=MAX_COLD_TIMEOUT_S)] = DEFAULT_COLD_TIMEOUT_S
    """The longest silence within an answer of the server."""
    take_over: bool = False
    """Whether to go on with what another store, which is gone, has left under the prefix."""

    @model_validator(mode="after")
    def _whole(self) -> ColdSettings:
        if (self.access_key is None) != (self.secret_key is None):
            raise PydanticCustomError("cold", "access_key and secret_key: both or none")
        if self.bucket is None and self.model_fields_set:
            raise PydanticCustomError("cold", "there is no bucket")
        return self


class MountSettings(_Section):
    """[mount]"""

    path: AbsolutePath = Path("/mnt/kvfs")
    mode: MountMode = "auto"
    """`auto` takes the fastest that works here: passthrough, then native, then plain."""
    allow_other: bool = True
    """Whether users besides the service's own see the mount; without root they never do."""


class SessionSettings(_Section):
    """[session]"""

    socket: Annotated[AbsolutePath, AfterValidator(_short_enough)] | None = None
    """None: see `Settings.socket_path`."""
    group: str | None = None
    """Members read the whole tier directly. None: `kvfs` where that group exists, else the service's own."""
    quota: Annotated[Size, Field(ge=0)] | None = None
    """Bytes that one uid may hold of replaced objects. None: half the DRAM capacity."""


class S3Settings(_Section):
    """[s3]"""

    region: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,64}$")] = "us-east-1"
    """What clients must sign for."""
    domains: tuple[Annotated[str, Field(pattern=r"^[a-z0-9.-]{1,253}$")], ...] = ()
    """`BUCKET.DOMAIN` of one of these means the bucket; the domain itself is path style."""
    default_bucket: Annotated[str, AfterValidator(_bucket_name)] | None = None
    """What a host of no domain means, where it is neither an IP address nor `localhost`. None: path style."""
    credentials: Annotated[tuple[Credential, ...], Field(max_length=MAX_CREDENTIALS)] = ()
    listen: Annotated[str, AfterValidator(_host_and_port)] | None = None
    """`HOST:PORT` of the S3 endpoint. None: the service starts none."""
    workers: Annotated[int, Field(ge=1, le=MAX_GATEWAY_WORKERS)] = 1
    """Processes that share the port."""
    certificate: AbsolutePath | None = None
    key: AbsolutePath | None = None
    """PEM files; with both, the endpoint speaks TLS. SIGHUP reads them, and the credentials, again."""
    admin: Annotated[str, AfterValidator(_host_and_port)] | None = None
    """`HOST:PORT` of /healthz and /metrics of the first worker; the next ports are the other workers'."""
    opaque_etags: tuple[str, ...] = ()
    """Globs of buckets whose objects get an opaque ETag: MD5 halves the speed of uploads."""
    large_buckets: tuple[str, ...] = ()
    """Globs of buckets that, created here, take files larger than DRAM does on the mount; needs an NVMe tier."""
    upload_expiry_s: Annotated[float, Field(ge=60)] = 7 * 86400.0
    """Multipart uploads that were not completed so long after their begin, and their last part, are removed."""
    connections: Annotated[int, Field(ge=1, le=MAX_GATEWAY_CONNECTIONS)] = MAX_GATEWAY_CONNECTIONS
    """Of one worker; when they are all taken, silent ones give way."""

    @model_validator(mode="after")
    def _both_or_none(self) -> S3Settings:
        if (self.certificate is None) != (self.key is None):
            raise PydanticCustomError("tls", "certificate and key are given together or not at all")
        return self


class EventSettings(_Section):
    """[events]: KV events over ZeroMQ in vLLM's form (docs/events.md); nothing is sent or heard unless asked for."""

    publish: str | None = None
    """Where the store's events go: `tcp://*:5557` is bound, a concrete address connected to."""
    replay: str | None = None
    """Bound; where subscribers ask for batches that they missed."""
    topic: str = "kvfs"
    engines: str | None = None
    """Bound; where engines' publishers connect, each with a topic of its own."""
    engine_replays: dict[str, str] = Field(default_factory=dict)
    """By topic, where that engine answers requests for replays."""

    @field_validator("replay")
    @classmethod
    def _of_what(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("publish") is None:
            raise PydanticCustomError("events", "there is nothing to replay without publish")
        return value


class LogSettings(_Section):
    """[log]"""

    level: LogLevel = "info"


class Settings(_Section):
    """All sections, validated."""

    store: StoreSettings = StoreSettings()
    dram: DramSettings = Field(default_factory=DramSettings)
    nvme: NvmeSettings = NvmeSettings()
    cold: ColdSettings = ColdSettings()
    mount: MountSettings = MountSettings()
    session: SessionSettings = SessionSettings()
    s3: S3Settings = S3Settings()
    events: EventSettings = EventSettings()
    log: LogSettings = LogSettings()
    _file: Path | None = PrivateAttr(default=None)

    @property
    def file(self) -> Path | None:
        """Where it was read from."""
        return self._file

    @property
    def nvme_path(self) -> Path:
        return self.nvme.path or self.store.data / "nvme"

    @property
    def nvme_bytes(self) -> int:
        """The NVMe tier's capacity, 0 without one."""
        if self.nvme.capacity is not None:
            return self.nvme.capacity
        return default_nvme_bytes(self.nvme_path)

    @property
    def socket_path(self) -> Path:
        """`[session] socket`, else `kvfs.sock` in the data directory (in /run or /tmp if it is too deep)."""
        if self.session.socket is not None:
            return self.session.socket
        path = self.store.data / "kvfs.sock"
        if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
            return path
        runtime = os.environ.get("XDG_RUNTIME_DIR") or (
            "/run" if os.geteuid() == 0 else tempfile.gettempdir()
        )
        return Path(runtime) / f"kvfs-{sha256(os.fsencode(self.store.data)).hexdigest()[:16]}.sock"


def load(file: Path | None = None, flags: Mapping[tuple[str, str], object] | None = None) -> Settings:
    """Settings from `file` and `flags`, which wins.

    `flags` maps (section, key) to a value; None stands for a flag that was not given. Raises ConfigError.
    """
    values = _read(file) if file is not None else {}
    for (section, key), value in (flags or {}).items():
        if value is not None:
            values.setdefault(section, {})[key] = value
    try:
        settings = Settings.model_validate(values)
        settings._file = file
        return settings
    except ValidationError as error:
        where = f"{file}: " if file is not None else ""
        raise ConfigError(where + "; ".join(_explain(error.errors()))) from None


def _read(file: Path) -> dict[str, dict[str, object]]:
    try:
        values = tomllib.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not TOML: {error}") from None
    for section, content in values.items():
        if not isinstance(content, dict):
            raise ConfigError(f"{file}: {section} = {content!r}: must stand in a section such as [store]")
    return values


def _explain(errors: Iterable[ErrorDetails]) -> Iterable[str]:
    """One phrase per error: "[dram] capacity = '12MiB': at least 16 MiB"."""
    for error in errors:
        where = [str(part) for part in error["loc"]]
        if where[:2] == ["s3", "credentials"]:
            yield _about_credentials(where[2:], error)
        elif error["type"] == "extra_forbidden":
            yield _unknown(where)
        elif where[0] == "cold" and where[1:2] in ([], ["secret_key"]):  # the value is a secret, or holds one
            yield f"[{' '.join(where[:2])}]: {_limit(where, error)}"
        else:
            yield f"[{where[0]}] {'.'.join(where[1:2])} = {error['input']!r}: {_limit(where, error)}"


def _about_credentials(where: list[str], error: ErrorDetails) -> str:
    """Never with the value: it may be a secret, or what holds one."""
    place = "[[s3.credentials]]"
    if where:
        number = f" number {int(where[0]) + 1}" if where[0].isdigit() else ""
        place += number + "".join(f" {part}" for part in where[1:])
    return f"{place}: {error['msg'][:1].lower()}{error['msg'][1:]}"


def _unknown(where: list[str]) -> str:
    if len(where) == 1:
        return f"[{where[0]}]: no such section; there are {', '.join(Settings.model_fields)}"
    section = Settings.model_fields[where[0]].annotation
    known = ", ".join(section.model_fields) if section is not None else ""
    return f"[{where[0]}] {where[1]}: no such key; there are {known}"


def _limit(where: list[str], error: ErrorDetails) -> str:
    context = error.get("ctx", {})
    sizes = where[1:] == ["capacity"] or where[:2] in (["session", "quota"], ["nvme", "scrub_rate"])
    for bound, words in (("ge", "at least"), ("le", "at most")):
        if bound in context:
            limit = context[bound]
            return f"{words} {format_size(limit) if sizes else limit}"
    if "expected" in context:
        return f"must be {context['expected']}"
    if error["type"] == "path_type":
        return "must be a path"
    message = error["msg"]
    return message[:1].lower() + message[1:]
