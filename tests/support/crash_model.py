"""What a store may show after its process was killed or its machine lost power: the oracle of the crash tests.

Responsibility: follow what clients said before and after each change, and judge what a later start finds.
It knows nothing of tiers: only which changes were acknowledged, and what a bucket's class promises.

What is allowed, by name ("bucket/key"; a block is "bucket:prefix hash"; a directory ends in "/"):
- the acknowledged value, or that of a change that was under way or whose outcome its client was not told;
- nothing, where a cache's bucket may forget;
- what a cache's name had before in this life, where the index is lost, too: its changes wait for no device;
- attributes (all of a value but its version and size) count in durable buckets, and while the index lives and
  nothing was under way: a cache's settle does not wait for them.
A version is given to one object only, so it may be found under one name only, one that it had.

Concurrency: none; plain state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Value = tuple[int, int, int, bool]
"""Version, size, mode, pinned. A directory has version 0."""
Assignment = tuple[str, Value | None]

DURABLE = ("dur/", "dkv:")
"""How names in durable buckets begin."""


def is_durable(name: str) -> bool:
    return name.startswith(DURABLE)


@dataclass(slots=True)
class Model:
    """See the module's header."""

    values: dict[str, Value] = field(default_factory=dict)
    under_way: dict[int, list[Assignment]] = field(default_factory=dict)
    """Client -> what its unfinished change would do."""
    unsure: dict[str, set[Value | None]] = field(default_factory=dict)
    """Name -> outcomes of changes that failed half-way."""
    acknowledged: int = 0
    blocks: dict[str, set[Value | None]] = field(default_factory=dict)
    """Every block of a cache that ever was there, or may have been."""
    past: dict[str, set[Value | None]] = field(default_factory=dict)
    """What names in caches have had in this life."""

    def hear(self, said: dict[str, Any]) -> None:
        """One line of a client: `begin` with its assignments, then `done`, `failed` or `unsure`."""
        client = said["client"]
        if "begin" in said:
            self.under_way[client] = [
                (name, None if value is None else _value(value)) for name, value in said["begin"]
            ]
            return
        assignments = self.under_way.pop(client)
        if "done" in said:
            self.acknowledged += 1
            for name, value in assignments:
                self._set(name, value)
        elif "unsure" in said:
            for name, value in assignments:
                self.unsure.setdefault(name, set()).add(value)

    def _set(self, name: str, value: Value | None) -> None:
        self._note_block(name, value)
        if "/" in name and not is_durable(name):
            before = {self.values.get(name), *self.unsure.get(name, ())}
            self.past.setdefault(name, set()).update(before, {value})
        self.unsure.pop(name, None)
        if value is None:
            self.values.pop(name, None)
        else:
            self.values[name] = value

    def _note_block(self, name: str, value: Value | None) -> None:
        if value is not None and "/" not in name and not is_durable(name):
            self.blocks.setdefault(name, set()).add(value)

    def outcomes(self) -> dict[str, set[Value | None]]:
        """Name -> what may be there, for every name that ever mattered."""
        found: dict[str, set[Value | None]] = {name: {value} for name, value in self.values.items()}
        for name, values in self.unsure.items():
            found.setdefault(name, {None}).update(values)
        for assignments in self.under_way.values():
            for name, value in assignments:
                found.setdefault(name, {None}).add(value)
        return found

    def forget_removals(self) -> None:
        """The index is lost, and a cold tier may have any block that was ever there: it may come back, also in the
        place of a later one of its name that the cache has forgotten meanwhile."""
        for name, values in self.blocks.items():
            self.unsure.setdefault(name, {None}).update(values)

    def judge(self, found: dict[str, Value], *, index_lives: bool) -> list[str]:
        """What is wrong with what a start found; empty when nothing is."""
        outcomes = self.outcomes()
        for name, values in self.past.items() if not index_lives else ():
            outcomes.setdefault(name, {None}).update(values)
        wrong = [*self._judge_values(outcomes, found, index_lives), *_twice(found)]
        there = {value[0] for value in found.values()}
        moved = self._moved(outcomes)
        for name, allowed in outcomes.items():
            if name in found or not is_durable(name):
                continue
            lost = self.values.get(name)
            if None not in allowed:
                wrong.append(f"{name} is lost: {sorted(allowed, key=str)}")
            elif lost is not None and lost[0] in moved and lost[0] not in there:
                wrong.append(f"{name} is lost on its way: {lost}")
        return wrong

    def _judge_values(
        self, outcomes: dict[str, set[Value | None]], found: dict[str, Value], index_lives: bool
    ) -> list[str]:
        wrong = []
        for name, value in found.items():
            allowed = outcomes.get(name, {None})
            if is_durable(name) or (index_lives and len(allowed) == 1):
                good = value in allowed
            else:
                good = value[:2] in {each[:2] for each in allowed if each is not None}
            if not good:
                wrong.append(f"{name} is {value}, allowed is {sorted(allowed, key=str)}")
        return wrong

    def _moved(self, outcomes: dict[str, set[Value | None]]) -> set[int]:
        """Versions that may be found under more than one durable name, and have to be under one of them.

        Not where a change failed half-way: a later one may have removed what it moved.
        """
        places: dict[int, list[str]] = {}
        for name, allowed in outcomes.items():
            for version in {value[0] for value in allowed if value is not None and value[0]}:
                places.setdefault(version, []).append(name)
        return {
            version
            for version, names in places.items()
            if len(names) > 1 and all(is_durable(name) and name not in self.unsure for name in names)
        }

    def restart(self, found: dict[str, Value]) -> Model:
        """What the next life begins with. That something in a cache was not found promises nothing: its eviction may
        not have reached the device, so until its name is used again it may be back."""
        forgotten = {
            name: allowed
            for name, allowed in self.outcomes().items()
            if name not in found and not is_durable(name)
        }
        for assignments in self.under_way.values():
            for name, value in assignments:
                self._note_block(name, value)
        return Model(dict(found), unsure=forgotten, acknowledged=self.acknowledged, blocks=self.blocks)


def _value(raw: list[Any] | Value) -> Value:
    version, size, mode, pinned = raw
    return (version, size, mode, pinned)


def _twice(found: dict[str, Value]) -> list[str]:
    seen: dict[int, str] = {}
    wrong = []
    for name, (version, *_) in found.items():
        if version and version in seen:
            wrong.append(f"version {version} is both {seen[version]} and {name}")
        seen[version] = name
    return wrong
