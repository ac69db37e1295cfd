"""This machine's standing among the members, as a state machine over the directory's answers.

Responsibility: which epoch it asks for, what an answer makes of it, and who the members are. docs/cluster.md has the
rules. Invariants: an epoch that was joined never changes; one that another has overtaken is never asked for again. A
machine that is refused knows the members all the same: it reads their blocks, and they none of its own.
Concurrency: the service's trio thread; no I/O.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvfs import limits
from kvfs.errors import ProtocolError
from tiers.cluster.location_format import NUMBER_BYTES

log = logging.getLogger("kvfs.cluster")

_REFUSALS = {
    "double": "another machine at {} says that it is this store: one data directory was copied, or started twice",
    "old": "this store has started elsewhere since (epoch {}): this service stays out of the cluster",
    "address": "another store has the address {}",
    "full": "the cluster has {} machines already, which is the limit",
}
_STANDINGS = {"joined", "kept", *_REFUSALS}


@dataclass(frozen=True, slots=True)
class Member:
    """Describes a machine whose lease lives, and what it reports of itself."""

    store_id: bytes
    number: int
    epoch: int
    address: str
    report: dict[str, Any]


class Membership:
    """Holds what one machine is in the cluster: `joined`, `refused`, `reads` (it serves nothing), or `waits`."""

    def __init__(self, store_id: bytes, address: str | None, epoch: int) -> None:
        self.store_id, self.address, self.epoch = store_id, address, epoch
        self.state = "waits"
        self.trouble = ""
        self.rivals = 0
        self.members: dict[int, Member] = {}
        """By number; this machine among them."""
        self.number = b""
        """This machine's in locations, 2 bytes, once it has joined."""
        self.is_overtaken = False
        """Whether a later epoch of this store was seen: only another start asks for the lease again."""
        self._has_joined = False

    @property
    def is_joined(self) -> bool:
        """Return whether the machine is a member that serves blocks."""
        return self.state == "joined"

    def arguments(self, report: dict[str, Any]) -> list[bytes]:
        """Return what BEAT is called with."""
        assert self.address is not None
        return [
            self.store_id,
            b"%d" % self.epoch,
            self.address.encode(),
            json.dumps(report).encode(),
            b"%d" % (limits.DIRECTORY_LEASE_S * 1000),
            b"%d" % limits.MAX_CLUSTER_NODES,
        ]

    def take(self, answer: object) -> bool:
        """Take the answer of a beat; return whether what the directory has of this machine must be written anew.

        Raises ProtocolError.
        """
        try:
            standing, detail, rival, *rows = _checked(answer)
            members = {member.number: member for member in map(_member, rows)}
            if standing in _REFUSALS:
                self._refuse(standing, detail.decode())
            elif detail:
                self.number = _checked_number(detail)
        except (ValueError, TypeError, UnicodeDecodeError) as error:
            raise ProtocolError(f"the directory's answer is none to a beat: {error}") from None
        self.members = members
        if standing in _REFUSALS or self.is_overtaken:
            return False
        # where a write learned of a lost lease after the beat that took it again, what changed between was not noted
        is_new = standing == "joined" or not self.is_joined
        self.state, self.trouble = "reads" if self.address is None else "joined", ""
        if rival:
            self._warn_of_rival(rival.decode(errors="replace"))
        self._has_joined = self._has_joined or standing == "joined"
        return is_new

    def lapse(self) -> None:
        """Note that the lease is another's, or gone: the next beat asks for it again."""
        if self.state == "joined":
            self.state = "waits"

    def addresses(self, numbers: Sequence[int]) -> tuple[str, ...]:
        """Return where those of the numbers are that are other members."""
        found = (self.members.get(number) for number in numbers)
        return tuple(each.address for each in found if each is not None and each.store_id != self.store_id)

    def _refuse(self, standing: str, detail: str) -> None:
        if standing == "old" and not self._has_joined:
            self.epoch = int(detail) + 1  # a start whose clock is behind the last one's
            return
        self.state, self.is_overtaken = "refused", standing == "old"
        if self.trouble != (trouble := _REFUSALS[standing].format(detail)):
            log.error("refused by the directory: %s", trouble)
        self.trouble = trouble

    def _warn_of_rival(self, address: str) -> None:
        self.rivals += 1
        self.trouble = _REFUSALS["double"].format(address)
        log.error("%s", self.trouble)


def _checked(answer: object) -> list[Any]:
    if not isinstance(answer, list) or len(answer) < 3:
        raise TypeError("no list of a standing, a detail and a rival")
    standing, detail, rival, *rows = answer
    if not all(isinstance(each, bytes) for each in (standing, detail, rival)):
        raise TypeError("a standing that is no text")
    if (standing := standing.decode()) not in _STANDINGS:
        raise ValueError(f"a standing {standing!r:.40}")
    return [standing, detail, rival, *rows]


def _checked_number(number: bytes) -> bytes:
    if len(number) != NUMBER_BYTES:
        raise ValueError("a number of another length")
    return number


def _member(row: Sequence[bytes]) -> Member:
    store_id, number, epoch, address, report = row
    parsed = json.loads(report or b"{}")
    if not isinstance(parsed, dict):
        raise ValueError("a member's row")
    number_int = int.from_bytes(_checked_number(number), "big")
    return Member(store_id, number_int, int(epoch), address.decode(), parsed)
