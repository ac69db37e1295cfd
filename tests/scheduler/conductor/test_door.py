"""The Conductor's door over a real socket: its operations, its document and metrics, and who may ask."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from kvfs import limits
from kvfs.config.load import load
from kvfs.config.settings import ConductorSettings
from kvfs.errors import ConfigError
from scheduler.conductor.door.conductor_metrics import ConductorCollector
from scheduler.conductor.door.mooncake import ALL_OPERATIONS
from scheduler.conductor.door.openapi import FIXED, OPEN
from scheduler.conductor.values import RouteRequest
from tests.support.conductors import Clock, asking, conductor, instance, serving
from tests.support.door_requests import PROMPT, given


# --- operations ----------------------------------------------------------------------------------------------
async def test_a_request_from_its_route_to_its_end() -> None:
    async with serving() as (service, addresses), asking(addresses) as asker:
        assert (await asker.ask("POST", "/v1/instances", given("a"))).status == 201
        assert (await asker.ask("POST", "/v1/instances", given("b"))).status == 201
        routed = await asker.ask("POST", "/v1/route", {"model": "m", "tokens": PROMPT})
        assert routed.status == 200
        id = routed.json["id"]
        assert routed.json["decode"] in ("a", "b")
        assert "degraded" in routed.json
        explained = await asker.ask("GET", f"/v1/explain/{id}")
        assert {each["instance"] for each in explained.json["prefill"]} == {"a", "b"}
        for step in ("prefilled", "prefill_failed", "first_token"):
            assert (await asker.ask("POST", f"/v1/reservations/{id}/{step}")).status == 204
        usage = {"cached_tokens": 0, "output_tokens": 7, "prefill_leg": True}
        for wrong in ({**usage, "output_tokens": 1 << 21}, {"cached_tokens": -1}):
            refused = await asker.ask("POST", f"/v1/reservations/{id}/done", wrong)
            assert (refused.status, "must be from 0 to 1048576" in refused.json["error"]["message"]) == (
                400,
                True,
            )
        assert (await asker.ask("POST", f"/v1/reservations/{id}/done", usage)).status == 204
        again = await asker.ask("POST", f"/v1/reservations/{id}/done")
        assert (again.status, again.json["error"]["code"]) == (404, "NotFound")
        assert service.conductor.status()["reservations"] == 0


async def test_instances_are_drained_relabelled_and_removed() -> None:
    async with serving() as (_, addresses), asking(addresses) as asker:
        await asker.ask("POST", "/v1/instances", given("a"))
        assert (await asker.ask("POST", "/v1/instances/a/role", {"role": "decode"})).status == 204
        assert (await asker.ask("POST", "/v1/instances/a/drain")).status == 204
        [shown] = (await asker.ask("GET", "/v1/instances")).json["instances"]
        assert (shown["role"], shown["draining"]) == ("decode", True)
        refused = await asker.ask("POST", "/v1/route", {"model": "m", "tokens": PROMPT})
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        assert refused.json["reason"] == "no instance takes work"
        assert (await asker.ask("POST", "/v1/instances/a/drain", {"draining": False})).status == 204
        assert (await asker.ask("DELETE", "/v1/instances/a")).status == 204
        assert (await asker.ask("DELETE", "/v1/instances/a")).status == 404
        gone = await asker.ask("POST", "/v1/route", {"model": "m", "tokens": PROMPT})
        assert (gone.status, gone.json["error"]["message"]) == (
            404,
            "model 'm': no instance of it is registered",
        )


async def test_a_batch_is_routed_in_order_or_not_at_all() -> None:
    async with serving() as (service, addresses), asking(addresses) as asker:
        await asker.ask("POST", "/v1/instances", given("a"))
        one = {"model": "m", "tokens": PROMPT}
        batch = await asker.ask("POST", "/v1/route_batch", {"requests": [one] * 40})
        assert [each["routed"]["decode"] for each in batch.json["answers"]] == ["a"] * 40
        wrong = await asker.ask("POST", "/v1/route_batch", {"requests": [one, {"model": "m", "length": 0}]})
        assert (wrong.status, wrong.json["error"]["message"][:20]) == (400, "requests[1]: length:")
        assert service.conductor.status()["reservations"] == 40
        many = {"requests": [{"model": "m", "length": 1}] * (limits.MAX_ROUTE_BATCH + 1)}
        assert (
            "the limit is 1024" in (await asker.ask("POST", "/v1/route_batch", many)).json["error"]["message"]
        )


async def test_what_each_instance_holds() -> None:
    async with serving() as (_, addresses), asking(addresses) as asker:
        await asker.ask("POST", "/v1/instances", given("a"))
        found = await asker.ask("POST", "/v1/match", {"model": "m", "tokens": PROMPT})
        assert found.json == {"instances": {"a": 0}}


async def test_the_openapi_document_has_every_operation_and_refers_to_nothing_that_is_missing() -> None:
    async with serving() as (_, addresses), asking(addresses) as asker:
        text = (await asker.ask("GET", "/openapi.json")).body.decode()
    document = json.loads(text)
    described = {
        (method.upper(), re.sub(r"\{\w+\}", "{}", path)): each
        for path, methods in document["paths"].items()
        for method, each in methods.items()
    }
    operations = {(each.method, each.path) for each in ALL_OPERATIONS}
    assert operations | {("GET", path) for path in FIXED} == set(described)
    for name in re.findall(r'"#/components/schemas/(\w+)"', text):
        assert name in document["components"]["schemas"]
    route = described["POST", "/v1/route"]
    assert set(route["responses"]) == {"200", "400", "401", "404", "411", "413", "429", "503"}
    schema = document["components"]["schemas"]["RouteRequest"]
    assert set(schema["properties"]) == set(RouteRequest.__struct_fields__)


@pytest.mark.parametrize("path", FIXED)
async def test_what_is_there_beside_the_operations_is_as_the_document_says(path: str) -> None:
    secret = "0123456789abcdef"
    token = f"Authorization: Bearer {secret}"
    async with serving(tokens=[secret]) as (_, addresses), asking(addresses) as asker:
        assert (await asker.ask("GET", path)).status == (200 if path in OPEN else 401)
        refused = await asker.ask("POST", path, {}, token)
        assert (refused.status, refused.headers["allow"]) == (405, "GET")
        answer = await asker.ask("GET", path, None, token)
        assert (answer.status, answer.headers["content-type"].partition(";")[0]) == (200, FIXED[path][1])


async def test_the_document_asks_for_a_token_where_one_is_needed_and_shows_limits() -> None:
    async with serving() as (_, addresses), asking(addresses) as asker:
        document = (await asker.ask("GET", "/openapi.json")).json
    assert document["security"] == []
    shown = document["components"]["schemas"]["Instance"]["properties"]["name"]
    assert (shown["minLength"], shown["maxLength"]) == (1, limits.MAX_NAME_BYTES)
    batch = document["components"]["schemas"]["RouteBatch"]["properties"]["requests"]
    assert batch["maxItems"] == limits.MAX_ROUTE_BATCH
    links = document["paths"]["/v1/route"]["post"]["responses"]["200"]["links"]
    assert links["done"]["parameters"] == {"id": "$response.body#/id"}
    token = "0123456789abcdef"
    async with serving(tokens=[token]) as (_, addresses), asking(addresses) as asker:
        document = (await asker.ask("GET", "/openapi.json", None, f"Authorization: Bearer {token}")).json
    assert document["security"] == [{"token": []}]


async def test_metrics_show_what_is_wrong() -> None:
    async with serving() as (service, addresses), asking(addresses) as asker:
        await asker.ask("POST", "/v1/instances", given("a"))
        await asker.ask("POST", "/v1/route", {"model": "m", "tokens": PROMPT})
        await asker.ask("POST", "/v1/route", {"model": "none", "tokens": PROMPT})
        service.conductor.registry.has_topic("stranger")
        text = (await asker.ask("GET", "/metrics")).body.decode()
    for line in (
        "kvfs_conductor_routed_total 1.0",
        "kvfs_conductor_degraded_total 1.0",
        'kvfs_conductor_unregistered_topic_batches_total{topic="stranger"} 1.0',
        'kvfs_conductor_stream_state{state="unknown",stream="engine-a"} 1.0',
        'kvfs_conductor_errors_total{code="NotFound"} 1.0',
        'kvfs_conductor_operation_seconds_count{operation="route"} 2.0',
    ):
        assert line in text, line


def test_every_metric_is_in_the_page() -> None:
    made = conductor(Clock(), instance("a"))
    page = (Path(__file__).parents[3] / "docs/conductor.md").read_text()
    for metric in ConductorCollector(made.status(), Counter(), Counter(), {}).collect():
        assert f"`{metric.name}{'_total' * (metric.type == 'counter')}`" in page


# --- who may ask ---------------------------------------------------------------------------------------------
async def test_without_a_token_nobody_learns_anything() -> None:
    token = "0123456789abcdef"
    async with serving(tokens=["another-token-of-16", token]) as (_, addresses), asking(addresses) as asker:
        assert (await asker.ask("GET", "/healthz")).status == 200
        for path in ("/v1/instances", "/metrics", "/openapi.json", "/nothing"):
            refused = await asker.ask("GET", path, None, "Authorization: Bearer 0123456789abcdeX")
            assert (refused.status, refused.headers["www-authenticate"]) == (401, "Bearer")
        assert (await asker.ask("GET", "/metrics", None, f"Authorization: Bearer {token}")).status == 200


def test_an_open_door_needs_tokens(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tokens are needed"):
        ConductorSettings(listen="0.0.0.0:9200")
    with pytest.raises(ValueError, match="fewer than 16 characters"):
        ConductorSettings.model_validate({"tokens": ["secret"]})
    file = tmp_path / "kvfs.toml"
    file.write_text('[conductor]\nlisten = "0.0.0.0:9200"\ntokens = ["short-secret"]\n')
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert "short-secret" not in str(caught.value)
