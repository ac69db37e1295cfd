"""Leases of memory that the kernel cannot guard: what a client copies from, and what the service may reuse."""

from typing import Self, final

@final
class Generations:
    """The generations of a pool's slots, written by the service alone: even while sealed."""

    def __new__(cls, slots: int) -> Self:
        """Make them, all 0. Raises InvalidRequest, OSError."""

    @property
    def fd(self) -> int:
        """The descriptor for clients, through which nobody can write."""

    def get(self, slot: int) -> int:
        """Return a slot's generation, 0 for a slot that there is not."""

    def set(self, slot: int, generation: int) -> None:
        """Move a slot to another generation. Raises InvalidRequest."""

@final
class Hazards:
    """What one client has leased, as the service sees it."""

    def __new__(cls, places: int = ...) -> Self:
        """Make the client's array, with room for so many leases. Raises InvalidRequest, OSError."""

    @property
    def fd(self) -> int:
        """The descriptor for the client, who writes the array."""

    def name(self, slot: int, generation: int) -> bool:
        """Return whether the client has this leased; counts once the slot has another generation."""

@final
class ClientHazards:
    """A client's own leases."""

    def __new__(cls, generations_fd: int, hazards_fd: int) -> Self:
        """Map what the service gave; both descriptors stay the caller's. Raises InvalidRequest, OSError."""

    def publish(self, slot: int, generation: int) -> int:
        """Lease a sealed slot; return the lease's place. Raises Superseded, Busy where all places are taken."""

    def clear(self, place: int) -> None:
        """End a lease, once nothing copies from its slot any more. Raises InvalidRequest where there is none."""
