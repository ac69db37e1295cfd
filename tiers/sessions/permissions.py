"""Which caller may do what to which name: the mount's rules (`default_permissions`) for the other doors.

Responsibility: apply `kvfs.rights.allows` along a name. A directory is a marker with attributes of its own,
or only a common prefix, which has the bucket's. Root and the service's own user may do everything.

- Reaching a name takes SEARCH on its bucket and every directory above it; reading takes READ on the object.
- Creating, replacing, removing and renaming take WRITE on the directory that holds the name; in a sticky
  one also ownership of the object or the directory.
- A block has its bucket's mode and owner.
- Pinning, evicting and changing attributes take ownership.

Concurrency: the service's trio thread; nothing awaits, so a check and what follows it are one step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from kvfs.errors import AccessDenied, NotFound, NotPermitted
from kvfs.rights import READ, SEARCH, WRITE, Caller, allows
from tiers.model.objects import Bucket, Directory, Name, ObjectInfo
from tiers.store.store import Store

STICKY = 0o1000
_WORDS = {READ: "read", WRITE: "write", SEARCH: "search"}


@dataclass(frozen=True, slots=True)
class Access:
    """Checks the rights of one caller on one store."""

    store: Store
    caller: Caller
    service_uid: int

    @property
    def privileged(self) -> bool:
        """Return whether the caller is root or the service's own user."""
        return self.caller.uid in (0, self.service_uid)

    def need(self, thing: Bucket | Directory | ObjectInfo, want: int, what: str) -> None:
        """Raise AccessDenied unless the caller has all of `want` on `thing`."""
        if self.privileged or allows(self.caller, mode=thing.mode, uid=thing.uid, gid=thing.gid, want=want):
            return
        words = " and ".join(word for bit, word in _WORDS.items() if bit & want)
        raise AccessDenied(f"uid {self.caller.uid} may not {words} {what} (mode {thing.mode & 0o7777:04o})")

    def need_bucket(self, bucket: bytes, want: int) -> Bucket:
        """Return the bucket. Raises BucketNotFound, AccessDenied."""
        found = self.store.bucket(bucket)
        self.need(found, want, f"bucket {bucket.decode(errors='replace')}")
        return found

    def need_path(self, name: Name) -> None:
        """Check SEARCH on every directory above `name`. Raises BucketNotFound, AccessDenied."""
        bucket = self.need_bucket(name.bucket, SEARCH)
        if not self.privileged:
            for directory in self._directories_above(bucket, name.key):
                self.need(directory, SEARCH, f"directory {directory.name}")

    def need_write_in(self, name: Name) -> None:
        """Check the right to create, replace or remove `name` in its directory."""
        self.need_path(name)
        if self.privileged:
            return
        parent = self._parent(name)
        self.need(parent, WRITE | SEARCH, f"the directory of {name}")
        if parent.mode & STICKY and self.caller.uid != parent.uid:
            self._need_ownership_where_there(name)

    def need_control(self, name: Name, found: ObjectInfo | Directory) -> None:
        """Check ownership. Raises NotPermitted."""
        self.need_path(name)
        if not self.privileged and self.caller.uid != found.uid:
            raise NotPermitted(f"{name} belongs to uid {found.uid}, not to uid {self.caller.uid}")

    def need_privilege(self, what: str) -> None:
        """Raise NotPermitted unless the caller is root or the service's user."""
        if not self.privileged:
            raise NotPermitted(
                f"uid {self.caller.uid} may not {what}: only root and the service's own user may"
            )

    def need_new_owner(self, uid: int | None, gid: int | None) -> None:
        """Raise NotPermitted as chown(2) does: owners may choose among their own groups, no more."""
        caller = self.caller
        if self.privileged:
            return
        if uid not in (None, caller.uid) or not (gid is None or gid == caller.gid or gid in caller.groups):
            raise NotPermitted(f"uid {caller.uid} may not give anything to uid {uid}, gid {gid}")

    def need_list(self, bucket: Bucket, prefix: bytes) -> bytes:
        """Check the right to list the directory that all keys with this prefix are in; return its key."""
        above = prefix[: prefix.rfind(b"/") + 1]
        if above and not self.privileged:
            name = Name(bucket.name, above)
            self.need_path(name)
            with suppress(NotFound):
                self.need(self.store.lookup(name), READ | SEARCH, str(name))
        return above

    def may_list(self, bucket: Bucket, key: bytes, above: bytes) -> bool:
        """Return whether the caller could reach `key` by listing directory after directory, beginning with `above`."""
        if self.privileged:
            return True
        try:
            for directory in self._directories_above(bucket, key):
                if len(directory.name.key) > len(above):
                    self.need(directory, READ | SEARCH, "")
        except AccessDenied:
            return False
        return True

    def _directories_above(self, bucket: Bucket, key: bytes) -> Iterator[Directory]:
        """Yield the directories between the bucket and `key`, from the top; common prefixes show as the bucket."""
        end = key.find(b"/")
        while 0 <= end < len(key) - 1:
            try:
                found = self.store.lookup(Name(bucket.name, key[: end + 1]))
            except NotFound:
                return
            if isinstance(found, Directory):
                yield found
            end = key.find(b"/", end + 1)

    def _parent(self, name: Name) -> Bucket | Directory:
        head, slash, _ = name.key.removesuffix(b"/").rpartition(b"/")
        bucket = self.store.bucket(name.bucket)
        if not slash:
            return bucket
        try:
            found = self.store.lookup(Name(name.bucket, head + slash))
        except NotFound:
            return bucket
        return found if isinstance(found, Directory) else bucket

    def _need_ownership_where_there(self, name: Name) -> None:
        try:
            found = self.store.lookup(name)
        except NotFound:
            return
        if self.caller.uid != found.uid:
            raise AccessDenied(f"{name} belongs to uid {found.uid} and its directory is sticky")
