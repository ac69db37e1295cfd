"""Several models behind one proxy: who gets a request, also while its Conductor names nobody."""

from __future__ import annotations

from typing import Any

import pytest

from kvfs import limits
from kvfs.errors import NotFound, NotReady
from scheduler.conductor.values import Instance, Refused, RouteRequest
from scheduler.proxy.routers.balance import LoadRouter
from scheduler.proxy.upstream.engines import EngineAddress, Engines
from tests.support.conductors import Clock, conductor, instance, serving
from tests.support.stub_engines import Stand, proxy_stand
from tests.support.waits import until

CHAT = "/v1/chat/completions"


def chat(model: str = "m") -> dict[str, Any]:
    return {"model": model, "max_tokens": 3, "messages": [{"role": "user", "content": "q"}]}


def registered(stand: Stand, **changes: tuple[Any, ...]) -> list[Instance]:
    """Make an instance of each engine, with the values of its place."""
    return [
        instance(f"i{at}", url=engine.url, **{name: values[at] for name, values in changes.items()})
        for at, engine in enumerate(stand.engines)
    ]


async def lead(made: Any, stand: Stand, **changes: tuple[Any, ...]) -> None:
    """Register the engines at a Conductor, and wait until the proxy knows them by their names."""
    for each in registered(stand, **changes):
        made.registry.add(each)
    await until(lambda: {engine.name for engine in stand.proxy.engines} >= set(made.registry._members))


def completions(stand: Stand) -> list[int]:
    return [len(engine.completions) for engine in stand.engines]


# --- while load decides --------------------------------------------------------------------------------------
async def test_by_load_a_request_goes_to_an_engine_of_its_model() -> None:
    made = conductor(Clock())
    async with proxy_stand("both", "both", router=made) as stand:
        await lead(made, stand, model=("m", "n"))
        made.unreachable("i0")
        made.unreachable("i1")
        for _ in range(4):
            assert (await stand.ask(CHAT, chat("n"))).status == 200
        assert stand.proxy.router.counts["by_load"] == 4
        assert completions(stand) == [0, 4]


async def test_without_its_conductor_the_proxy_keeps_to_models_and_to_what_is_routable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "CONDUCTOR_LOOK_S", 0.05)
    async with (
        serving() as (service, addresses),
        proxy_stand("both", "both", "both", conductor=addresses.http) as stand,
    ):
        await lead(service.conductor, stand, model=("m", "n", "n"), routable=(True, True, False))
        service.stop()
        await until(lambda: stand.proxy.remote is not None and bool(stand.proxy.remote.down))
        for _ in range(4):
            assert (await stand.ask(CHAT, chat("n"))).status == 200
        assert completions(stand) == [0, 4, 0]
        unknown = await stand.ask(CHAT, chat("x"))
        assert (unknown.status, unknown.json()["error"]["code"]) == (404, "model_not_found")


async def test_by_load_an_instance_that_is_not_routable_gets_nothing() -> None:
    made = conductor(Clock())
    async with proxy_stand("both", "both", router=made) as stand:
        await lead(made, stand, routable=(True, False))
        made.unreachable("i0")
        for path in (CHAT, CHAT, "/v1/embeddings", "/v1/embeddings"):
            assert (await stand.ask(path, chat())).status == 200
        assert stand.proxy.router.counts["by_load"] == 2
        assert not stand.engines[1].asked


async def test_by_load_labels_count_from_the_moment_that_they_are_given() -> None:
    made = conductor(Clock())
    async with proxy_stand("both", "both", router=made) as stand:
        await lead(made, stand)
        made.unreachable("i0")
        made.unreachable("i1")
        made.registry.set_role("i0", "prefill")
        for _ in range(3):
            assert (await stand.ask(CHAT, chat())).status == 200
        assert [
            len([each for each in engine.completions if each.body["max_tokens"] == 3])
            for engine in stand.engines
        ] == [0, 3]
        made.registry.member("i1")[1].relabels_to = "prefill"
        assert (await stand.ask(CHAT, chat())).status == 200
        assert stand.engines[0].completions[-1].body["max_tokens"] == 3, "any engine is better than none"


# --- what has no route ---------------------------------------------------------------------------------------
BOUNDARY = "----of-the-test"
FORM = (
    f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF\r\n'
    f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="model"\r\n\r\nn\r\n--{BOUNDARY}--\r\n'
).encode()


async def test_what_is_passed_on_and_tokenized_goes_to_an_engine_of_the_model() -> None:
    made = conductor(Clock())
    async with proxy_stand("both", "both", router=made) as stand:
        await lead(made, stand, model=("m", "n"))
        for path in ("/v1/embeddings", "/v1/responses", "/tokenize", CHAT):
            assert (await stand.ask(path, chat("n"))).status == 200
        assert [each.path for each in stand.engines[1].asked].count("/tokenize") == 2
        assert not stand.engines[0].asked
        unknown = await stand.ask("/v1/embeddings", chat("x"))
        assert (unknown.status, unknown.json()["error"]["param"]) == (404, "model")


async def test_the_model_of_a_form_is_found() -> None:
    made = conductor(Clock())
    async with proxy_stand("both", "both", router=made) as stand:
        await lead(made, stand, model=("m", "n"))
        headers = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
        for engine in stand.engines:
            engine.reads_bodies = False
        answer = await stand.ask("/v1/audio/transcriptions", FORM, headers=headers)
        assert answer.status == 200
        assert [len(engine.asked) for engine in stand.engines] == [0, 1]


# --- which engines there are for a model ---------------------------------------------------------------------
def engines(*addresses: EngineAddress) -> Engines:
    return Engines(addresses, lambda name: None)


def at(name: str, **more: Any) -> EngineAddress:
    return EngineAddress(f"http://{name}.test", name=name, **more)


def test_the_only_engine_of_a_model_is_tried_though_it_is_down_and_another_models_answers() -> None:
    known = engines(at("a", model="m"), at("b", model="n"))
    [_, second] = known
    known.suspect(second, "it refuses connections")
    assert [each.name for each in known.alive(model="n")] == ["b"]
    assert not second.refusal
    assert (list(known.down("m")), list(known.down("n"))) == ([], ["b"])


def test_engines_that_nobody_labelled_serve_what_nobody_is_labelled_for() -> None:
    known = engines(at("a", model="m"), EngineAddress("http://b.test"))
    assert [each.name for each in known.alive(model="m")] == ["a", "http://b.test"]
    assert [each.name for each in known.alive(model="n")] == ["http://b.test"]


def test_a_model_of_nobody_is_not_found_by_load_but_no_engines_at_all_may_come() -> None:
    with pytest.raises(NotFound, match="'x'"):
        LoadRouter(engines(at("a", model="m"))).route(RouteRequest(model="x", length=1))
    assert isinstance(LoadRouter(engines()).route(RouteRequest(model="x", length=1)), Refused)


def test_engines_that_are_awaited_may_have_a_model_and_the_first_few_are_named() -> None:
    known = engines(at("a", model="m"))
    known.awaited = {f"http://{letter}.test" for letter in "bcdefghijk"}
    with pytest.raises(NotReady, match=r"'x'.*: http://b\.test, .*http://i\.test and 2 more$"):
        known.check_model("x")
    known.check_model("m")
    known.awaited = ()
    with pytest.raises(NotFound, match="'x'"):
        known.check_model("x")


# --- engines that say themselves what they serve -------------------------------------------------------------
MODELS = "/v1/models"


async def serve(stand: Stand, *models: list[str]) -> None:
    """Have engines serve these models, and wait until the proxy has seen them."""
    for engine, served in zip(stand.engines, models, strict=True):
        engine.models = served
    for known in stand.proxy.engines:
        known.listed_s = float("-inf")
    wanted = list(map(frozenset, models))
    await until(lambda: [each.models for each in stand.proxy.engines] == wanted)


async def test_the_list_of_models_is_that_of_all_engines_with_each_model_once() -> None:
    async with proxy_stand("both", "both", "both") as stand:
        await serve(stand, ["m", "a"], ["m", "b"], ["org/c d"])
        answer = await stand.ask(f"{MODELS}?x=1", method="GET")
        assert (answer.status, answer.json()["object"]) == (200, "list")
        listed = answer.json()["data"]
        assert [each["id"] for each in listed] == ["m", "a", "b", "org/c d"]
        assert listed[0]["owned_by"] == stand.engines[0].url
        assert (await stand.ask(MODELS, {})).status == 405


async def test_one_model_is_found_and_an_unknown_one_is_a_404_as_openai_has_it() -> None:
    async with proxy_stand("both", "both") as stand:
        await serve(stand, ["m"], ["org/c d"])
        for path in (f"{MODELS}/org/c%20d", f"{MODELS}/org%2Fc%20d"):
            answer = await stand.ask(path, method="GET")
            assert (answer.status, answer.json()["id"]) == (200, "org/c d")
        unknown = await stand.ask(f"{MODELS}/x", method="GET")
        assert (unknown.status, unknown.json()["error"]["code"]) == (404, "model_not_found")
        assert unknown.json()["error"]["message"] == "The model `x` does not exist"


async def test_what_an_engine_that_fails_has_is_not_called_unknown() -> None:
    async with proxy_stand("both", "both") as stand:
        await serve(stand, ["m"], ["n"])
        stand.engines[1].models_status = 500
        assert [each["id"] for each in (await stand.ask(MODELS, method="GET")).json()["data"]] == ["m"]
        assert (await stand.ask(f"{MODELS}/n", method="GET")).status == 503
        stand.engines[0].models_status = stand.engines[1].models_status = 401
        assert (await stand.ask(MODELS, method="GET")).status == 401


async def test_without_labels_requests_go_to_the_engine_that_lists_their_model() -> None:
    async with proxy_stand("both", "both") as stand:
        await serve(stand, ["m"], ["n"])
        for path in (CHAT, CHAT, "/v1/embeddings", "/tokenize"):
            assert (await stand.ask(path, chat("n"))).status == 200
        assert [len(engine.asked) for engine in stand.engines] == [0, 4]
        for _ in range(2):
            assert (await stand.ask(CHAT, chat("a name of nobody"))).status == 200
        assert completions(stand) == [1, 3], "any engine may say what it means"
        stand.engines[1].die()
        assert (await stand.ask(CHAT, chat("n"))).status == 503
        assert completions(stand) == [1, 3]
