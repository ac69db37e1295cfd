"""Who gives up a place among the connections, against a plain model."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from kvfs import limits
from kvfs.http.connection_slots import Place, Places, network_of


@dataclass
class Transport:
    answered_s: float = 0.0


async def taken(places: Places, address: str = "10.0.0.1") -> Place:
    await places.wait()
    place = places.take(address)
    assert place is not None
    return place


async def test_the_oldest_silent_stranger_goes_first(autojump_clock: trio.testing.MockClock) -> None:
    places = Places(4)
    busy, known, served, silent = [await taken(places, f"10.0.0.{number}") for number in range(4)]
    busy.silent_s = None
    known.known = True
    served.transport = Transport(trio.current_time() + 1)
    for expected in (silent, known, served):
        new = await taken(places, "10.0.1.1")
        new.silent_s = None
        assert expected.scope.cancel_called
        assert len(places) == 4
    assert not busy.scope.cancel_called
    assert (places.closed_silent, places.refused) == (3, 0)


async def test_who_is_served_keeps_his_place(autojump_clock: trio.testing.MockClock) -> None:
    """A new one waits until a request has ended."""
    places = Places(1)
    busy = await taken(places)
    busy.silent_s = None
    with trio.move_on_after(5) as waiting:
        await places.wait()
    assert waiting.cancelled_caught
    places.release(busy)
    await taken(places)


async def test_an_address_has_a_share() -> None:
    places = Places(100)
    own = [await taken(places) for _ in range(100)]
    assert sum(place.scope.cancel_called for place in own) >= 100 - limits.ADDRESS_PERCENT
    assert len(places) <= limits.ADDRESS_PERCENT
    for place in own:
        place.silent_s = None
    while len(places) < limits.ADDRESS_PERCENT:
        (await taken(places)).silent_s = None
    assert places.take("10.0.0.1") is None
    assert places.refused == 1
    assert places.take("10.0.0.2") is not None


async def test_the_log_is_told_once_a_minute(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    places = Places(2)
    for _ in range(50):
        await taken(places, "10.0.0.1")
        await trio.sleep(1)
    assert len(caplog.records) == 1
    await trio.sleep(limits.LOG_INTERVAL_S)
    await taken(places, "10.0.0.2")
    await taken(places, "10.0.0.1")
    assert len(caplog.records) == 2


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["new", "busy", "quiet", "leave"])), max_size=60)
)
def test_places_are_never_more_than_there_are(steps: list[tuple[int, str]]) -> None:
    async def run() -> None:
        places, held = Places(8), list[Place]()
        for number, step in steps:
            if step == "new":
                with trio.move_on_after(0):
                    await places.wait()
                    place = places.take(f"10.0.0.{number}")
                    if place is not None:
                        held.append(place)
            elif held:
                place = held[number % len(held)]
                if step == "leave":
                    held.remove(place)
                    places.release(place)
                elif not place.scope.cancel_called:
                    place.silent_s = None if step == "busy" else trio.current_time()
            assert len(places) <= 8
            assert all(not place.scope.cancel_called for place in held if place.silent_s is None)
            assert len(places) == sum(not place.scope.cancel_called for place in held)

    trio.run(run)


def test_who_has_an_address_has_its_network() -> None:
    assert network_of("10.1.2.3") == "10.1.2.3"
    assert network_of("2001:db8:1:2:3:4:5:6") == network_of("2001:db8:1:2:ffff::1")
    assert network_of("2001:db8:1:2::1") != network_of("2001:db8:1:3::1")
    assert network_of("::ffff:10.1.2.3") == "10.1.2.3"
    assert network_of("fe80::1%eth0") == network_of("fe80::2%eth0")
