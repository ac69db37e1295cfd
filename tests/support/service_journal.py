"""What a service was told to change, and what of it was answered: the oracle of the service crash tests.

Responsibility: note the beginning and the answer of each change of each name, whatever door it came through, and judge
what a later start shows. It knows nothing of kvfs: only names, the bytes that were written, and the order of calls.

What may be under a name: the outcome of each change that no later one has superseded. A change is superseded once
another one of the same name that began after its answer was answered itself. So several outcomes are possible only
where calls ran side by side, and where a call was cut off before its answer. Nothing older is forgiven, ever. A cache
may miss besides, and a durable name may not.

Every version has bytes of its own, so that a digest says which one it is. A directory, a pin and the like are names
with a value in words.

Concurrency: any thread may note and ask.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

Value = str | None
"""The digest of bytes, or a word; None: nothing there."""

ANYTHING: Final = "anything"
"""What a call leaves that failed half-way, where that is undefined."""
HISTORY: Final = 12
"""Changes of a name that the message of a failure shows."""


def digest_of(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=12).hexdigest()


EMPTY: Final = digest_of(b"")


@dataclass(slots=True, eq=False)
class Change:
    """One call, or what was found at a start."""

    what: str
    assignments: Mapping[str, Value]
    moves: tuple[tuple[str, str], ...]
    """(source, target) of what this change moves."""
    began: int
    life: int
    answered: int | None = None
    """When it was, or when its service died; None while it is under way."""
    done: bool = False
    """Whether the answer was yes."""

    def __str__(self) -> str:
        state = "under way" if self.answered is None else "answered" if self.done else "cut off"
        return f"life {self.life}, {self.began} to {self.answered}: {self.what}, {state}"


@dataclass(slots=True)
class Name:
    """What happened to one name."""

    changes: list[Change] = field(default_factory=list)
    """Those that are not superseded, the oldest first; a new name has none."""
    past: dict[str, str] = field(default_factory=dict)
    """What it ever held, and by which change."""
    ended: dict[Value, float] = field(default_factory=dict)
    """When each value that is superseded was so, by time.monotonic()."""
    shown: deque[str] = field(default_factory=lambda: deque(maxlen=HISTORY))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a start shows that it must not, and how much was there."""

    wrong: list[str]
    lost: list[str]
    """Durable names that were answered and are not there."""
    right: int
    missing: int
    """Names of caches of which that is true."""


class Journal:
    """See the module's header."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._names: dict[str, Name] = {}
        self._under_way: set[Change] = set()
        self._cut_off: list[Change] = []
        self._clock = 0
        self._copied: set[str] = {EMPTY}
        self._places: dict[str, str] = {}
        """Where each version was first."""
        self.life = 0
        self.answers = 0

    # --- what clients say ----------------------------------------------------------------------------------
    def begin(
        self,
        what: str,
        assignments: Mapping[str, Value],
        moves: Iterable[tuple[str, str]] = (),
        *,
        copies: bool = False,
    ) -> Change:
        """A call is about to be made. `copies`: its version may be under several names from now on."""
        with self._lock:
            change = Change(what, dict(assignments), tuple(moves), self._tick(), self.life)
            self._under_way.add(change)
            for name, value in change.assignments.items():
                known = self._names.setdefault(name, Name())
                known.changes.append(change)
                if value is not None:
                    known.past[value] = what
                    if copies or (self._places.setdefault(value, name) != name and not change.moves):
                        self._copied.add(value)
            return change

    def done(self, change: Change) -> None:
        """It was answered: what it found is superseded."""
        with self._lock:
            self.answers += 1
            change.done = True
            self._answer(change)
            now = time.monotonic()
            for name in change.assignments:
                known = self._names[name]
                standing = [
                    each
                    for each in known.changes
                    if each is change or each.answered is None or each.answered >= change.began
                ]
                known.ended |= {each.assignments[name]: now for each in known.changes if each not in standing}
                known.changes = standing

    def failed(self, change: Change, why: object) -> None:
        """It was refused: nothing has changed."""
        with self._lock:
            change.what += f" refused: {why}"
            self._answer(change)
            for name in change.assignments:
                known = self._names[name]
                known.changes = [each for each in known.changes if each is not change]

    def unsure(self, change: Change, why: object) -> None:
        """It failed, or its connection did: it happened or it did not."""
        with self._lock:
            change.what += f" unsure: {why}"
            self._answer(change)

    def _answer(self, change: Change) -> None:
        self._under_way.discard(change)
        change.answered = self._tick()
        for name in change.assignments:
            self._names[name].shown.append(f"{change} -> {change.assignments[name]}")

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    # --- what may be there -----------------------------------------------------------------------------------
    def possible(self, name: str) -> set[Value]:
        """What the name may hold now."""
        with self._lock:
            known = self._names.get(name)
            if known is None or not known.changes:
                return {None}
            values = {change.assignments[name] for change in known.changes}
            if not any(change.done for change in known.changes):
                values.add(None)  # nothing was ever answered: it is a name that may not be there yet
            return values

    def under_way(self) -> list[str]:
        with self._lock:
            return [f"{change} of {sorted(change.assignments)}" for change in self._under_way]

    def names(self) -> list[str]:
        with self._lock:
            return list(self._names)

    def explain(self, name: str) -> str:
        """The last changes of a name."""
        with self._lock:
            known = self._names.get(name, Name())
            pending = [f"{change} -> {change.assignments[name]}" for change in known.changes]
            return "\n    ".join(
                [f"{name}: possible {self.possible(name)}", *known.shown, "standing:", *pending]
            )

    # --- a death and a start -----------------------------------------------------------------------------------
    def died(self) -> None:
        """The service is gone, and with it all that was under way: it has happened by now, or never will."""
        with self._lock:
            self._cut_off = list(self._under_way)
            for change in self._cut_off:
                self._answer(change)
            self.life += 1

    def index_lost(self, since: float, names: Iterable[str]) -> None:
        """What was superseded since then (time.monotonic()) may be back, in names that begin with one of `names`."""
        beginnings = tuple(names)
        with self._lock:
            for name, known in self._names.items():
                if name.startswith(beginnings):
                    for value in [value for value, ended in known.ended.items() if ended >= since]:
                        change = Change(
                            "ended, and the index lost", {name: value}, (), self._tick(), self.life
                        )
                        known.changes.append(change)
                        self._answer(change)

    def judge(self, found: Mapping[str, str], durable: Iterable[str]) -> Verdict:
        """What is wrong with what a start shows; `durable` are beginnings of names that may lose nothing."""
        promised = tuple(durable)
        wrong, lost, right, missing = [], [], 0, 0
        with self._lock:
            for name, value in found.items():
                allowed = self.possible(name)
                if value in allowed or ANYTHING in allowed:
                    right += 1
                else:
                    wrong.append(f"{name} is {self._which(name, value)}\n    {self.explain(name)}")
            for name in self._names.keys() - found.keys():
                if None in (allowed := self.possible(name)) or ANYTHING in allowed:
                    continue
                if name.startswith(promised):
                    lost.append(name)
                else:
                    missing += 1
            wrong += self._twice(found)
            wrong += self._lost_on_the_way(found, promised)
        return Verdict(wrong, lost, right, missing)

    def _which(self, name: str, value: str) -> str:
        known = self._names.get(name)
        if known is not None and value in known.past:
            return f"an OLDER version, {value} of {known.past[value]}"
        if value in self._places:
            return f"bytes of {self._places[value]} ({value})"
        return f"what NOBODY wrote ({value})"

    def _twice(self, found: Mapping[str, str]) -> list[str]:
        places: dict[str, str] = {}
        wrong = []
        for name, value in found.items():
            if value not in self._places or value in self._copied:
                continue
            if value in places:
                wrong.append(f"one object is both {places[value]} and {name}\n    {self.explain(name)}")
            places[value] = name
        return wrong

    def _lost_on_the_way(self, found: Mapping[str, str], promised: tuple[str, ...]) -> list[str]:
        wrong = []
        for change in self._cut_off:
            for source, target in change.moves:
                value = change.assignments[target]
                if value in (found.get(source), found.get(target)) or self._replaced(change, target, found):
                    continue
                if target.startswith(promised):
                    wrong.append(f"{source} is lost on its way to {target}\n    {self.explain(target)}")
        return wrong

    def _replaced(self, change: Change, target: str, found: Mapping[str, str]) -> bool:
        """Whether a name shows what a change made of it that may have come after another one."""
        return any(
            each is not change
            and each.assignments[target] == found.get(target)
            and (each.answered is None or each.answered > change.began)
            for each in self._names[target].changes
        )

    def observed(self, found: Mapping[str, str]) -> None:
        """Go on from what a start showed: one of several outcomes it is, from now on. What a cache missed may be
        found later, if it is what was answered last: its slot or its bytes may only be unreadable for now."""
        with self._lock:
            self._cut_off = []
            for name, known in self._names.items():
                value = found.get(name)
                if value is None and None not in self.possible(name):
                    continue
                change = Change("found at the start", {name: value}, (), self._tick(), self.life, done=True)
                change.answered = self._tick()
                known.changes = [change]
                known.shown.append(f"life {self.life}: found {value}")
                if value is not None:
                    known.past.setdefault(value, "found at a start")

    def give_up(self, name: str) -> None:
        """It is lost for a known reason, and may be missing from now on."""
        with self._lock:
            self.unsure(self.begin("lost to damage", {name: None}), "known")


@dataclass
class Contents:
    """The bytes of each version that may still be somewhere."""

    bytes_of: dict[str, bytes] = field(default_factory=dict)

    def note(self, data: bytes) -> str:
        digest = digest_of(data)
        self.bytes_of[digest] = data
        return digest

    def keep(self, digests: set[str | None]) -> None:
        self.bytes_of = {digest: data for digest, data in self.bytes_of.items() if digest in digests}
