"""What a proxy counts, against what engines and clients did."""

from __future__ import annotations

from pathlib import Path

import trio
from prometheus_client.parser import text_string_to_metric_families

from scheduler.proxy.proxy_metrics import _GAUGES, Counts, ProxyCollector, Snapshot
from scheduler.proxy.upstream.engines import Engines
from tests.scheduler.proxy.test_router_port import NotingRouter
from tests.support.stub_engines import PROMPT, Stand, proxy_stand
from tests.support.waits import until

BODY = {"prompt": "p", "max_tokens": 5}
STREAM = {**BODY, "stream": True}
TOKEN = "a token of the test"


async def metrics(stand: Stand, **headers: str) -> dict[tuple[str, str], float]:
    """Return all values by name and first label's value."""
    answer = await stand.ask("/metrics", method="GET", headers=headers)
    assert answer.status == 200
    return {
        (sample.name, next(iter(sample.labels.values()), "")): sample.value
        for family in text_string_to_metric_families(answer.body.decode())
        for sample in family.samples
    }


async def test_requests_are_counted_by_outcome() -> None:
    async with proxy_stand("both", "both") as stand:
        first, second = stand.engines
        await stand.ask("/v1/completions", BODY)
        await stand.ask("/v1/completions", STREAM)
        await stand.ask("/v1/models", method="GET")
        await stand.ask("/v1/completions", b"{")
        first.behaviour = second.behaviour = "die_after"
        await stand.ask("/v1/completions", STREAM)
        first.behaviour = second.behaviour = "busy"
        await stand.ask("/v1/completions", BODY)
        first.behaviour = second.behaviour = "pause"
        asker = await stand.asker()
        await asker.send("/v1/completions", BODY)
        await until(lambda: stand.proxy.handler.in_flight == 1)
        await trio.aclose_forcefully(asker.stream)
        await until(lambda: stand.proxy.handler.in_flight == 0)
        found = await metrics(stand)
        outcomes = {
            label: value for (name, label), value in found.items() if name == "kvfs_proxy_requests_total"
        }
        assert outcomes == {"answered": 3, "refused": 0, "rejected": 1, "failed": 1, "broken": 1, "gone": 1}
        assert found["kvfs_proxy_retries_total", ""] == 1
        assert found["kvfs_proxy_failed_legs_total", ""] == 3
        assert found["kvfs_proxy_first_byte_seconds_count", "streamed"] == 2
        assert found["kvfs_proxy_first_byte_seconds_count", "whole"] == 1
        # Five events, the end and, of the broken stream, a second: what one receive gave is one piece.
        assert 1 <= found["kvfs_proxy_token_seconds_count", "streamed"] <= 6


async def test_legs_engines_and_predictions_are_counted() -> None:
    router = NotingRouter()
    async with proxy_stand("both", "both", router=router) as stand:
        router.stand = stand
        router.cached_tokens = 320
        stand.engines[0].cached_tokens = 288
        await stand.ask("/v1/completions", {"prompt": PROMPT})
        await stand.ask("/v1/completions", {"prompt": PROMPT, "echo": True})
        found = await metrics(stand)
        assert found["kvfs_proxy_prefill_legs_total", ""] == 1
        assert found["kvfs_proxy_legs_skipped_total", "echo"] == 1
        assert found["kvfs_proxy_predicted_tokens_total", "P"] == 320
        assert found["kvfs_proxy_cached_tokens_total", "P"] == 288
        assert found["kvfs_proxy_predicted_tokens_total", "D"] == 0, "they were predicted of the other"
        assert found["kvfs_proxy_tokenized_total", ""] == 1
        stand.engines[1].die()
        await stand.ask("/v1/completions", BODY)
        assert (await metrics(stand))["kvfs_proxy_instance_up", "D"] == 0


async def test_metrics_need_a_token_where_there_are_any() -> None:
    async with proxy_stand(bearer_tokens=(TOKEN,)) as stand:
        assert (await stand.ask("/metrics", method="GET")).status == 401
        assert ("kvfs_proxy_in_flight", "") in await metrics(stand, Authorization=f"Bearer {TOKEN}")


async def test_every_metric_is_in_the_page() -> None:
    page = (Path(__file__).parents[3] / "docs/proxy.md").read_text()
    snapshot = Snapshot(Counts(), Engines((), lambda name: None), dict.fromkeys(_GAUGES, 0.0))
    for metric in ProxyCollector(snapshot).collect():
        row = f"| `{metric.name}{'_total' * (metric.type == 'counter')}` | {metric.type} | {metric.documentation} |"
        assert row in page
