"""Clients of a real service that change it at random through all its doors, and note what they were answered.

Responsibility: the load of the service crash tests: threads that write, replace, rename, remove, truncate, append, pin
through the mount, native sessions and S3, read back what they were answered, and end when the service does. Names
belong to one worker each, but for a few that all of them replace.

Concurrency: each `Worker` runs in a thread of its own; they share the `Journal` and the `Trigger`.
"""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from botocore.exceptions import BotoCoreError, ClientError

from kvfs.client import Client, connect
from kvfs.errors import DeadlinePassed, KvfsError, NotFound
from tests.support.block_batches import Block, BlockBatches, open_blocks
from tests.support.service_calls import (
    Trigger,
    closing,
    describe,
    http_status,
    is_busy,
    is_gone,
    write_pieces,
)
from tests.support.service_journal import ANYTHING, Change, Contents, Journal, digest_of
from tests.support.stores import NAMESPACE

CACHE, DURABLE, LARGE, LARGE_DURABLE = "cache", "dur", "large", "ldur"
BLOCKS, DURABLE_BLOCKS = "kv", "dkv"
PROMISED: Final = (DURABLE + "/", LARGE_DURABLE + "/", DURABLE_BLOCKS + ":")
"""How names begin that may lose nothing."""
BLOCK_SALTS: Final = {BLOCKS: "", DURABLE_BLOCKS: "durable"}
SIZES: Final = (16, 100, 511, 4096, 5_000, 20_000, 70_000, 150_000, 300_000)
LARGE_SIZES: Final = (16, 5_000, 131_072, 131_073, 400_000)
CALL_WAIT_S: Final = 20.0
EDGE_TIMES_NS: Final = (-1, -(10**9), -(2**63), 0, 1, 2**31 * 10**9, 2**32 * 10**9, 2**63 - 1)
EDGE_MODES: Final = (0, 0o777, 0o7777, 0o200)
EDGE_KEYS: Final = ("x", "ü" * 100, "y" * 255, "/".join(["z" * 100] * 10), "new\nline", "%41 +&", "~", "a b")


class Ended(Exception):
    """The service is gone: the worker stops, and what it was doing stays under way."""


class Refused(Exception):
    """The call failed; the journal knows how."""


@dataclass
class Worker:
    """One thread's random changes."""

    number: int
    life: int
    seed: int
    journal: Journal
    contents: Contents
    trigger: Trigger
    mount: Path
    buckets: list[str]
    s3: Any = None
    changes: int = 60
    mostly_renames: bool = False
    edges: bool = False
    """Whether it uses values at the edge of their fields."""
    said: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    chance: random.Random = field(init=False)
    client: Client | None = None
    blocks: dict[str, BlockBatches] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.chance = random.Random(f"{self.seed}/{self.life}/{self.number}")
        root = f"w{self.number}"
        self.keys = [f"{root}/k{n}" for n in range(8)]
        self.keys += [f"{root}/d{d}/{n}" for d in range(3) for n in range(3)]
        self.link_keys = [f"{root}/l{n}" for n in range(4)]
        self.block_keys = [bytes([self.number + 1, n + 1]) * 8 for n in range(8)]

    # --- life --------------------------------------------------------------------------------------------------
    def run(self) -> None:
        """Until the service ends, or all changes are made."""
        actions: list[tuple[int, Callable[[], None]]] = [
            (22 if not self.mostly_renames else 60, self.put),
            (6, self.write_synced),
            (12 if not self.mostly_renames else 60, self.rename),
            (4 if not self.mostly_renames else 12, self.rename_directory),
            (8, self.remove),
            (5, self.append),
            (5, self.truncate),
            (5, self.copy),
            (5, self.pin),
            (5, self.mark),
            (8, self.put_shared),
            (8, self.link),
            (10, self.block),
            (6 if self.edges else 0, self.edge),
        ]
        weights = [weight for weight, _ in actions]
        try:
            self.prepare()
            for _ in range(self.changes):
                with suppress(Refused):
                    self.chance.choices(actions, weights)[0][1]()
                if self.trigger.ending.is_set():
                    break
        except Ended:
            pass
        except BaseException as error:
            self.wrong.append(f"worker {self.number}: {type(error).__name__}: {error}")
            raise
        finally:
            if self.client is not None:
                with suppress(KvfsError, OSError):
                    self.client.close()

    def prepare(self) -> None:
        with self.guarded():
            self.client = connect(self.mount, timeout_s=CALL_WAIT_S)
            for bucket in BLOCK_SALTS.keys() & set(self.buckets):
                wanted = replace(NAMESPACE, salt=BLOCK_SALTS[bucket])
                self.blocks[bucket] = open_blocks(self.client, wanted, bucket=bucket)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """For calls that change nothing which is judged. Raises Ended, Refused."""
        try:
            yield
        except (OSError, KvfsError, ClientError, BotoCoreError) as error:
            self.note(error)
            if is_gone(error):
                self.lost(error)
            raise Refused from error

    def lost(self, error: BaseException) -> None:
        """The connection is. Raises Ended, unless the service lives on (a worker of the gateway may be killed)."""
        if isinstance(error, BotoCoreError | ClientError) and not self.trigger.ending.wait(0.2):
            return
        raise Ended from error

    def note(self, error: BaseException) -> None:
        self.said[describe(error)] += 1

    # --- one change --------------------------------------------------------------------------------------------
    def change(
        self, begun: Change, call: Callable[[], object], *, whole: bool = True, promised: bool = True
    ) -> None:
        """Make it and note how it ended. `whole`: a refusal has no effect; `promised`: its answer says something
        (fsync without an NVMe tier does nothing). Raises Ended, Refused."""
        try:
            call()
        except (OSError, KvfsError, ClientError, BotoCoreError) as error:
            self.note(error)
            if is_gone(error):
                if self.trigger.ending.is_set():
                    raise Ended from error
                self.lost(error)
                self.journal.unsure(begun, describe(error))
            elif isinstance(error, DeadlinePassed) or is_busy(error):
                self.journal.unsure(begun, describe(error))
            elif whole:
                self.journal.failed(begun, describe(error))
            else:
                self.journal.unsure(begun, describe(error))
                half = self.journal.begin("half-way", dict.fromkeys(begun.assignments, ANYTHING))
                self.journal.unsure(half, "undefined")
            raise Refused from error
        if self.trigger.ending.is_set() and not os.path.ismount(self.mount):
            raise Ended  # it may have been done to the directory below, once the mount was taken down
        if promised:
            self.journal.done(begun)
        else:
            self.journal.unsure(begun, "nothing is promised")
        self.said[begun.what.partition(" (")[0]] += 1
        self.trigger.reach("answer")
        if not whole:
            self.trigger.reach("close")

    def fresh(self, bucket: str) -> bytes:
        """Bytes that nobody has written yet."""
        return self.chance.randbytes(self.chance.choice(LARGE_SIZES if bucket.startswith("l") else SIZES))

    def pick(self) -> tuple[str, str]:
        """Bucket and key of a name of this worker."""
        files = [bucket for bucket in self.buckets if bucket not in BLOCK_SALTS]
        return self.chance.choice(files), self.chance.choice(self.keys)

    def pick_existing(self) -> tuple[str, str]:
        """One that holds something, if there is any in its bucket."""
        bucket, key = self.pick()
        there = [key for key in self.keys if self.sure(f"{bucket}/{key}") is not None]
        return bucket, self.chance.choice(there) if there else key

    def sure(self, name: str) -> str | None:
        """The one version that is there, as far as is known; None where it is another thing."""
        possible = self.journal.possible(name)
        return possible.pop() if len(possible) == 1 else None

    def path(self, name: str) -> Path:
        return self.mount / name

    def doors(self) -> list[str]:
        return ["mount", "mount", "session"] + (["s3"] if self.s3 is not None else [])

    @property
    def session(self) -> Client:
        assert self.client is not None
        return self.client

    def put(self) -> None:
        bucket, key = self.pick()
        name, data = f"{bucket}/{key}", self.fresh(bucket)
        value = self.contents.note(data)
        door = self.chance.choice(self.doors())
        if door == "mount":
            if self.chance.random() < 0.5:
                self.write(name, data)
            else:
                self.write_and_rename(name, data)
        elif door == "session":
            begun = self.journal.begin("session put", {name: value})
            self.change(begun, lambda: self.session.put(name, data))
        else:
            self.put_s3(name, data)
        self.read_back(name)

    def write(self, name: str, data: bytes, *, synced: bool = False) -> None:
        """Open, write in pieces, close."""
        begun = self.journal.begin(f"mount write ({len(data)} bytes)", {name: digest_of(data)})

        def call() -> None:
            self.parents(name)
            fd = os.open(self.path(name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            with closing(fd):
                write_pieces(fd, data, self.chance.choice([4096, 100_000, 1 << 20]))
                if synced:
                    os.fsync(fd)

        self.change(begun, call, whole=False)

    def parents(self, name: str) -> None:
        self.path(name).parent.mkdir(parents=True, exist_ok=True)

    def write_and_rename(self, name: str, data: bytes) -> None:
        """What editors, checkpoints and package managers do."""
        temporary = f"{name}.tmp"
        self.write(temporary, data, synced=self.chance.random() < 0.6)
        self.move(temporary, name, digest_of(data))

    def write_synced(self) -> None:
        """What fsync has answered is there after a kill, and so is what close has."""
        bucket, key = self.pick()
        name, first, rest = f"{bucket}/{key}", self.fresh(bucket), self.fresh(bucket)
        begun = self.journal.begin("mount fsync", {name: self.contents.note(first)})
        fd = -1

        def write_first() -> None:
            nonlocal fd
            self.parents(name)
            fd = os.open(self.path(name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                write_pieces(fd, first, 1 << 20)
                os.fsync(fd)
            except BaseException:
                with suppress(OSError):
                    os.close(fd)
                raise

        self.change(begun, write_first, whole=False, promised=DURABLE in self.buckets)
        begun = self.journal.begin("mount close after fsync", {name: self.contents.note(first + rest)})

        def write_rest() -> None:
            with closing(fd):
                write_pieces(fd, rest, 1 << 20)

        self.change(begun, write_rest, whole=False)
        self.read_back(name)

    def put_s3(self, name: str, data: bytes) -> None:
        bucket, _, key = name.partition("/")
        value, how = digest_of(data), self.chance.random()
        if how < 0.25:
            upload = ""
            with self.guarded():
                upload = self.s3.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]
                place = {"Bucket": bucket, "Key": key, "UploadId": upload}
                part = self.s3.upload_part(**place, PartNumber=1, Body=data)
            begun = self.journal.begin("s3 multipart", {name: value})
            parts = {"Parts": [{"ETag": part["ETag"], "PartNumber": 1}]}
            self.change(begun, lambda: self.s3.complete_multipart_upload(**place, MultipartUpload=parts))
        else:
            options = {"IfNoneMatch": "*"} if how < 0.45 else {}
            begun = self.journal.begin(f"s3 put {options}" if options else "s3 put", {name: value})
            self.change(begun, lambda: self.s3.put_object(Bucket=bucket, Key=key, Body=data, **options))

    def move(self, source: str, target: str, value: str) -> None:
        """Rename through the mount or a session."""
        door = self.chance.choice(["mount", "mount", "session"])
        begun = self.journal.begin(f"{door} rename", {source: None, target: value}, [(source, target)])
        self.trigger.reach("rename")
        if door == "mount":
            self.change(begun, lambda: os.rename(self.path(source), self.path(target)))
        else:
            self.change(begun, lambda: self.session.rename(source, target))

    def rename(self) -> None:
        bucket, key = self.pick_existing()
        source, target = f"{bucket}/{key}", f"{bucket}/{self.chance.choice(self.keys)}"
        value = self.sure(source)
        if source == target or value is None or not self.is_there(source):
            return
        with self.guarded():
            self.parents(target)
        self.move(source, target, value)
        self.read_back(target)

    def is_there(self, name: str) -> bool:
        with self.guarded():
            return self.path(name).exists()
        return False

    def rename_directory(self) -> None:
        bucket, _ = self.pick()
        here, there = self.chance.sample([f"{bucket}/w{self.number}/d{n}" for n in range(4)], 2)
        sources = [name for name in self.journal.names() if name.startswith(here + "/")]
        if any(len(self.journal.possible(name)) != 1 for name in sources):
            return
        targets = {name: there + name[len(here) :] for name in sources}
        values = {name: self.sure(name) for name in sources}
        assignments: dict[str, str | None] = {}
        for name, target in targets.items():
            if values[name] is not None and self.is_there(name):
                assignments |= {name: None, target: values[name]}
        moves = [(name, targets[name]) for name in sources if name in assignments]
        if moves:
            begun = self.journal.begin("mount rename of a directory", assignments, moves)
            self.trigger.reach("rename")
            self.change(begun, lambda: os.rename(self.path(here), self.path(there)))

    def remove(self) -> None:
        bucket, key = self.pick_existing()
        name, door = f"{bucket}/{key}", self.chance.choice(self.doors())
        begun = self.journal.begin(f"{door} remove", {name: None})
        calls: dict[str, Callable[[], object]] = {
            "mount": lambda: os.unlink(self.path(name)),
            "session": lambda: self.session.remove(name),
            "s3": lambda: self.s3.delete_object(Bucket=bucket, Key=key),
        }
        self.change(begun, calls[door])
        self.read_back(name)

    def append(self) -> None:
        bucket, key = self.pick_existing()
        name, rest = f"{bucket}/{key}", self.fresh(bucket)
        before = self.contents.bytes_of.get(self.sure(name) or "")
        if before is None or len(before) > 2_000_000:
            return
        begun = self.journal.begin("mount append", {name: self.contents.note(before + rest)})

        def call() -> None:
            fd = os.open(self.path(name), os.O_WRONLY | os.O_APPEND)
            with closing(fd):
                write_pieces(fd, rest, 1 << 20)

        self.change(begun, call, whole=False)
        self.read_back(name)

    def truncate(self) -> None:
        bucket, key = self.pick_existing()
        name = f"{bucket}/{key}"
        before = self.contents.bytes_of.get(self.sure(name) or "")
        if before is None:
            return
        size = self.chance.randrange(16, len(before) + 5_000) if len(before) > 16 else 20_000
        data = before[:size].ljust(size, b"\0")
        begun = self.journal.begin(f"mount truncate (to {size})", {name: self.contents.note(data)})
        self.change(begun, lambda: os.truncate(self.path(name), size))
        self.read_back(name)

    def copy(self) -> None:
        if self.s3 is None:
            return
        bucket, key = self.pick_existing()
        target = self.chance.choice(self.keys)
        value = self.sure(f"{bucket}/{key}")
        if value is None or key == target:
            return
        source = {"Bucket": bucket, "Key": key}
        begun = self.journal.begin("s3 copy", {f"{bucket}/{target}": value}, copies=True)
        self.change(begun, lambda: self.s3.copy_object(Bucket=bucket, Key=target, CopySource=source))
        self.read_back(f"{bucket}/{target}")

    def pin(self) -> None:
        """A file that is written once, and then pinned and unpinned."""
        name = (
            f"{self.chance.choice([b for b in (CACHE, DURABLE) if b in self.buckets])}/w{self.number}/pinned"
        )
        if self.sure(name) is None or not self.is_there(name):
            data = self.fresh(CACHE)
            self.contents.note(data)
            self.write(name, data)
            begun = self.journal.begin("mount setxattr", {f"{name}#pin": None})
            self.change(begun, lambda: os.setxattr(self.path(name), "user.kvfs.pin", b"0"))
        value = self.chance.choice("01")
        begun = self.journal.begin("mount setxattr", {f"{name}#pin": "pinned" if value == "1" else None})
        self.change(begun, lambda: os.setxattr(self.path(name), "user.kvfs.pin", value.encode()))

    def mark(self) -> None:
        """Make or remove a directory."""
        bucket, _ = self.pick()
        name = f"{bucket}/w{self.number}/m{self.chance.randrange(3)}/"
        if self.chance.random() < 0.6:
            with self.guarded():
                self.parents(name.removesuffix("/"))
            begun = self.journal.begin("mkdir", {name: "directory"})
            self.change(begun, lambda: os.mkdir(self.path(name)))
        else:
            begun = self.journal.begin("rmdir", {name: None})
            self.change(begun, lambda: os.rmdir(self.path(name)))

    def link(self) -> None:
        """Make a symbolic link, whose content is where it leads, in place of another one; or remove it."""
        bucket, _ = self.pick()
        name, target = (
            f"{bucket}/{self.chance.choice(self.link_keys)}",
            f"gone/{self.chance.randbytes(40).hex()}",
        )
        value = digest_of(target.encode())
        if self.chance.random() < 0.2:
            begun = self.journal.begin("mount unlink", {name: None})
            self.change(begun, lambda: os.unlink(self.path(name)))
        elif self.chance.random() < 0.3:
            begun = self.journal.begin("session symlink", {name: value})
            self.change(begun, lambda: self.session.symlink(target, name, replace=True))
        else:
            beside = f"{name}.beside"
            with self.guarded():
                self.parents(name)
            begun = self.journal.begin("mount symlink", {beside: value})
            self.change(begun, lambda: os.symlink(target, self.path(beside)))
            self.move(beside, name, value)

    def put_shared(self) -> None:
        """A name that all workers replace, each time as a whole."""
        bucket, _ = self.pick()
        data = self.fresh(bucket)
        name = f"{bucket}/shared/{self.chance.randrange(3)}"
        value, door = self.contents.note(data), self.chance.choice(self.doors())
        if door == "mount":
            temporary = f"{bucket}/w{self.number}/temporary"
            self.write(temporary, data)
            with self.guarded():
                self.parents(name)
            self.move(temporary, name, value)
        elif door == "session":
            begun = self.journal.begin("session put", {name: value})
            self.change(begun, lambda: self.session.put(name, data))
        else:
            self.put_s3(name, data)

    def block(self) -> None:
        held = [bucket for bucket in self.buckets if bucket in BLOCK_SALTS]
        if not held:
            return
        bucket, digest = self.chance.choice(held), self.chance.choice(self.block_keys)
        digest = digest[:-1] + bytes([len(bucket)])
        name, blocks = f"{bucket}:{digest.hex()}", self.blocks[bucket]
        if self.chance.random() < 0.4:
            begun = self.journal.begin("remove block", {name: None})
            self.change(begun, lambda: blocks.remove([digest]))
            return
        data = self.chance.randbytes(self.chance.choice(SIZES))
        begun = self.journal.begin("put block", {name: self.contents.note(data)})

        def call() -> None:
            if not blocks.put([Block(digest, data)])[0]:
                raise FileExistsError(errno.EEXIST, "the block is there")

        self.change(begun, call)

    def edge(self) -> None:
        """A value at the edge of its field; whatever the answer is, the service goes on and starts again."""
        bucket, _ = self.pick()
        if bucket.startswith("l"):
            return
        name = f"{bucket}/w{self.number}/edge/{self.chance.choice(EDGE_KEYS)}"
        data, chosen = self.chance.randbytes(64), self.chance.randrange(5)
        mtime_ns, mode = self.chance.choice(EDGE_TIMES_NS), self.chance.choice(EDGE_MODES)
        begun = self.journal.begin(f"edge {chosen}", {name: self.contents.note(data)})
        if chosen == 0:
            self.change(begun, lambda: self.session.put(name, data, mtime_ns=mtime_ns))
            return
        if chosen == 1:
            self.change(begun, lambda: self.session.put(name, data, mode=mode, user_metadata=bytes(2048)))
            return

        def call() -> None:
            self.parents(name)
            fd = os.open(self.path(name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            with closing(fd):
                write_pieces(fd, data, 16)
                if chosen == 2:
                    with suppress(OverflowError):
                        os.utime(fd, ns=(mtime_ns, mtime_ns))

        self.change(begun, call, whole=False)
        with self.guarded():
            if chosen == 3:
                with suppress(OverflowError):
                    os.utime(self.path(name), ns=(mtime_ns, mtime_ns))
            elif chosen == 4:
                os.chmod(self.path(name), mode)
                os.chown(self.path(name), self.chance.choice([0, 65534, 2**32 - 2]), 0)

    # --- what was answered is there --------------------------------------------------------------------------
    def read_back(self, name: str) -> None:
        """Through any door; a cache may miss."""
        if self.chance.random() > 0.35:
            return
        allowed = self.journal.possible(name)
        door = self.chance.choice(self.doors())
        try:
            found = self.read(name, door)
        except Refused:
            return
        if found in allowed or ANYTHING in allowed:
            return
        if found is None and door == "mount" and self.trigger.ending.is_set():
            return  # the mount is gone, and with it all of its names
        if found is None and not name.startswith(PROMISED):
            self.said["read back: a miss"] += 1
            return
        self.wrong.append(f"{door} reads {found} while the service runs\n    {self.journal.explain(name)}")

    def read(self, name: str, door: str) -> str | None:
        """The digest, None for a miss. Raises Ended, Refused."""
        with self.guarded():
            try:
                return self.read_raw(name, door)
            except (FileNotFoundError, NotFound):
                return None
            except ClientError as error:
                if http_status(error) == 404:
                    return None
                raise
        return None

    def read_raw(self, name: str, door: str) -> str:
        bucket, _, key = name.partition("/")
        if door == "mount":
            return digest_of(self.path(name).read_bytes())
        if door == "session":
            return digest_of(self.session.get(name))
        return digest_of(self.s3.get_object(Bucket=bucket, Key=key)["Body"].read())
