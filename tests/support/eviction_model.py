"""What an eviction policy must do, as a plain model and a state machine that holds a policy to it."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tiers.eviction.policy import EvictionPolicy

COOLED = 1 << 40
"""More than the uses of any run: what was cooled goes before the rest."""


@dataclass
class Known:
    size_bytes: int
    parent: int | None
    group: int | None
    pinned: bool


class Model:
    """The policy's definition, written down without a thought for cost."""

    def __init__(self) -> None:
        self.keys: dict[int, Known] = {}
        self.used: dict[int, int] = {}
        """Last use of each unit, by its group or its only key; the two do not overlap."""
        self.uses = 0

    def unit(self, key: int) -> list[int]:
        group = self.keys[key].group
        return [key] if group is None else [k for k, known in self.keys.items() if known.group == group]

    def use(self, key: int) -> None:
        self.uses += 1
        group = self.keys[key].group
        self.used[key if group is None else group] = self.uses

    def cool(self, key: int) -> None:
        self.use(key)
        group = self.keys[key].group
        self.used[key if group is None else group] -= COOLED

    def is_cool(self, unit: list[int]) -> bool:
        return self.last_use(unit[0]) < 0

    def last_use(self, key: int) -> int:
        group = self.keys[key].group
        return self.used[key if group is None else group]

    def insert(self, key: int, size_bytes: int, parent: int | None, pinned: bool, group: int | None) -> None:
        self.keys.pop(key, None)
        ancestor = parent
        while ancestor is not None:
            if ancestor == key:
                parent = None
                break
            ancestor = self.keys[ancestor].parent if ancestor in self.keys else None
        self.keys[key] = Known(size_bytes, parent, group, pinned)
        self.use(key)

    def may_go(self, unit: list[int], gone: set[int]) -> bool:
        """Whether `unit` is a whole leaf without pins, when `gone` are not there."""
        children = {k for k, known in self.keys.items() if known.parent in unit}
        pinned = any(self.keys[k].pinned for k in unit)
        return set(unit) == set(self.unit(unit[0])) and not pinned and not children - set(unit) - gone

    def next_victim(self, gone: set[int]) -> list[int] | None:
        """The leaf without pins whose last use is the oldest, when `gone` are not there."""
        best: tuple[int, list[int]] | None = None
        for key in self.keys.keys() - gone:
            unit = self.unit(key)
            if not self.may_go(unit, gone):
                continue
            used = self.last_use(key)
            if best is None or used < best[0]:
                best = used, unit
        return None if best is None else best[1]

    def bytes_of(self, unit: list[int]) -> int:
        return sum(self.keys[key].size_bytes for key in unit)


keys = st.integers(0, 24)
wanted = st.integers(0, 60)


class EvictionAgainstModel(RuleBasedStateMachine):
    """Subclasses name the policy. One that `goes_by_last_use` must choose as the model does, others what
    was cooled, and then any legal unit."""

    goes_by_last_use = True

    def __init__(self) -> None:
        super().__init__()
        self.policy = self.empty_policy()
        self.model = Model()

    def empty_policy(self) -> EvictionPolicy[int]:
        raise NotImplementedError

    def is_empty(self) -> bool:
        """Whether the policy has nothing left behind."""
        raise NotImplementedError

    def choose(self, data: st.DataObject) -> int | None:
        return data.draw(st.sampled_from(sorted(self.model.keys))) if self.model.keys else None

    def insert_key(
        self, key: int, size_bytes: int, parent: int | None, pinned: bool, group: int | None
    ) -> None:
        self.policy.insert(key, size_bytes=size_bytes, parent=parent, now=0.0, pinned=pinned, group=group)
        self.model.insert(key, size_bytes, parent, pinned, group)

    def remove_key(self, key: int) -> None:
        self.policy.remove(key)
        del self.model.keys[key]

    def touch_key(self, key: int) -> None:
        self.policy.touch(key, 0.0)
        self.model.use(key)

    @rule(
        key=keys,
        size_bytes=st.integers(0, 9),
        parent=st.none() | keys,
        pinned=st.sampled_from([False] * 7 + [True]),
    )
    def insert_block(self, key: int, size_bytes: int, parent: int | None, pinned: bool) -> None:
        self.insert_key(key, size_bytes, parent, pinned, None)

    @rule(start=keys, length=st.integers(2, 8), backwards=st.booleans())
    def insert_chain(self, start: int, length: int, backwards: bool) -> None:
        chain = list(range(start, min(start + length, 25)))
        for key in reversed(chain) if backwards else chain:
            self.insert_key(key, 1, key - 1 if key > start else None, False, None)

    @rule(
        key=keys,
        size_bytes=st.integers(0, 9),
        pinned=st.sampled_from([False] * 7 + [True]),
        group=st.integers(100, 102),
    )
    def insert_file(self, key: int, size_bytes: int, pinned: bool, group: int) -> None:
        self.insert_key(key, size_bytes, None, pinned, group)

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        if (key := self.choose(data)) is not None:
            self.touch_key(key)

    @rule(data=st.data())
    def cool(self, data: st.DataObject) -> None:
        if (key := self.choose(data)) is not None:
            self.policy.cool(key)
            self.model.cool(key)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if (key := self.choose(data)) is not None:
            self.remove_key(key)

    @rule(data=st.data(), pinned=st.booleans())
    def pin(self, data: st.DataObject, pinned: bool) -> None:
        if (key := self.choose(data)) is not None:
            self.model.keys[key].pinned = pinned
            (self.policy.pin if pinned else self.policy.unpin)(key)

    def check(self, unit: list[int], gone: set[int]) -> None:
        assert not gone & set(unit)
        assert self.model.may_go(unit, gone)
        first = self.model.next_victim(gone)
        assert first is not None
        if self.goes_by_last_use or self.model.is_cool(first):
            assert set(unit) == set(first)

    @rule(bytes_needed=wanted, evicted=st.integers(0, 5))
    def plan_then_evict(self, bytes_needed: int, evicted: int) -> None:
        """All victims are asked for first; then some go."""
        units = list(self.policy.victims(bytes_needed, 0.0))
        gone: set[int] = set()
        for unit in units:
            assert bytes_needed > 0
            self.check(unit, gone)
            gone.update(unit)
            bytes_needed -= self.model.bytes_of(unit)
        assert bytes_needed <= 0 or self.model.next_victim(gone) is None
        for unit in units[:evicted]:
            for key in unit:
                self.remove_key(key)

    @rule(data=st.data(), bytes_needed=wanted)
    def change_while_evicting(self, data: st.DataObject, bytes_needed: int) -> None:
        gone: set[int] = set()
        for unit in self.policy.victims(bytes_needed, 0.0):
            assert bytes_needed > 0
            self.check(unit, gone)
            bytes_needed -= self.model.bytes_of(unit)
            gone.update(unit)
            what = data.draw(
                st.sampled_from(
                    ["evict", "evict", "keep", "touch", "touch another", "cool another", "insert", "stop"]
                )
            )
            if what == "evict":
                for key in unit:
                    self.remove_key(key)
            elif what == "touch":
                self.touch_key(unit[0])
                gone.difference_update(unit)
            elif what == "touch another" and (other := self.choose(data)) is not None:
                gone.difference_update(self.model.unit(other))
                self.touch_key(other)
            elif what == "cool another" and (other := self.choose(data)) is not None:
                self.policy.cool(other)
                self.model.cool(other)
            elif what == "insert":
                key = data.draw(keys)
                self.insert_key(key, 1, data.draw(st.none() | keys), False, None)
                gone.discard(key)
            elif what == "stop":
                return
            gone &= self.model.keys.keys()
        assert bytes_needed <= 0 or self.model.next_victim(gone) is None

    @invariant()
    def totals_agree(self) -> None:
        assert len(self.policy) == len(self.model.keys)
        assert self.policy.total_bytes == sum(known.size_bytes for known in self.model.keys.values())
        assert all(key in self.policy for key in self.model.keys)

    def teardown(self) -> None:
        """With no pin left, everything can go, parents last, and nothing stays behind in the policy."""
        for key in self.model.keys:
            self.policy.unpin(key)
        seen: set[int] = set()
        for unit in self.policy.victims(1 << 30, 0.0):
            assert not {
                self.model.keys[key].parent for key in self.model.keys.keys() - seen - set(unit)
            } & set(unit)
            seen.update(unit)
            for key in unit:
                self.policy.remove(key)
        assert seen == set(self.model.keys)
        assert self.is_empty()
