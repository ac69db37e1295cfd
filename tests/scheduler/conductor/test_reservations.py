"""The ledger of reservations against a plain model: whatever clients do, die of or repeat."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from kvfs import limits
from scheduler.conductor.values import Routed, RouteRequest, Usage
from tests.support.conductors import Clock, conductor, instance


@dataclass
class Known:
    """What the model knows of a reservation."""

    prefill: str
    decode: str
    tokens: int
    deadline_s: float
    stage: str = "prefilling"


@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 1 << 32), roles=st.sampled_from([("both",) * 3, ("prefill", "decode", "decode")]))
def test_every_state_of_the_ledger_is_the_model_s(seed: int, roles: tuple[str, ...]) -> None:
    rng, clock = random.Random(seed), Clock()
    made = conductor(clock, *(instance(name, role=role) for name, role in zip("abc", roles, strict=True)))
    live: dict[str, Known] = {}
    over: list[str] = []

    def end(id: str) -> None:
        del live[id]
        over.append(id)

    def route() -> None:
        tokens = rng.choice((30, 700, 9000))
        found = made.route(RouteRequest(model="m", tokens=[rng.randrange(3)] * tokens))
        assert isinstance(found, Routed)
        assert found.id not in live
        prefill = found.prefill or found.decode
        live[found.id] = Known(prefill, found.decode, tokens, clock.now_s + found.deadline_s)

    def report() -> None:
        id = rng.choice([*live, *over[-3:], "nobody", ""])
        known = live.get(id)
        match rng.choice(("prefilled", "prefill_failed", "first_token", "first_token", "done", "cancel")):
            case "prefilled":
                made.prefilled(id)
                if known is not None and known.stage == "prefilling":
                    known.stage = "prefilled"
            case "prefill_failed":
                made.prefill_failed(id)
                if known is not None and known.stage == "prefilling" and known.prefill != known.decode:
                    known.stage = "prefilled"
            case "first_token":
                made.first_token(id)
                if known is not None and known.stage != "decoding":
                    known.stage, known.deadline_s = "decoding", clock.now_s + limits.DECODE_DEADLINE_S
            case "done":
                made.done(
                    id,
                    Usage(cached_tokens=rng.choice((None, 0, 500)), output_tokens=rng.choice((None, 0, 9))),
                )
                if known is not None:
                    end(id)
            case _:
                made.cancel(id)
                if known is not None:
                    end(id)

    def wait() -> None:
        clock.now_s += rng.choice((0.0, 0.05, 1.0, 200.0, limits.DECODE_DEADLINE_S))
        made.tick()
        for id in [id for id, known in live.items() if known.deadline_s <= clock.now_s]:
            end(id)

    def check() -> None:
        status = {each["name"]: each for each in made.status()["instances"]}
        [pool] = made.registry.pools()
        for name, shown in status.items():
            load = pool.planner.load(pool.members[name].slot, clock.now_s)
            here = [known for known in live.values() if known.decode == name]
            decoding = [known for known in here if known.stage == "decoding"]
            waiting = len(here) - len(decoding)
            assert (load.active_requests, load.committed_requests) == (len(decoding), waiting)
            assert load.active_tokens == sum(known.tokens for known in decoding)
            assert load.committed_tokens == sum(known.tokens for known in here) - load.active_tokens
            # A prefill that is overdue counts as done, so there may be fewer than the model has.
            unfinished = sum(k.prefill == name and k.stage == "prefilling" for k in live.values())
            assert load.queued + load.is_prefilling <= unfinished
            assert shown["requests"] == sum(name in (k.prefill, k.decode) for k in live.values())
        assert len(pool.planner) == sum(known.stage != "decoding" for known in live.values())
        assert made.status()["reservations"] == len(live)
        assert len(made._reservations._deadlines) <= 2 * len(live) + 2

    for _ in range(80):
        rng.choice((route, route, report, report, report, wait))()
        check()
    for id in list(live):
        made.cancel(id)
        end(id)
    clock.now_s += limits.EXPECTED_BLOCKS_S
    made.tick()
    check()
    assert made.status()["blocks"] == 0, "nothing is expected of requests that are over"
