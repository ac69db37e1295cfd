"""vLLM on two machines of one cluster: what an engine computed on one is fetched and loaded on the other, by a hint.

Each machine is a host of a network of their own, or where that is not allowed has a loopback address of its own. The
first engine's answers, computed without any cache, are the reference.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import kvfs
from kvfs.limits import CONNECTOR_FETCH_S
from tests.engines.engine import BLOCK_TOKENS, Engine, Engines, Run, same_output, whole_blocks
from tests.engines.test_vllm_connector import connector
from tests.engines.tiny_llama import VOCABULARY
from tests.support.door import ON_DIRECTORY
from tests.support.hosted_services import CLUSTER_PORT
from tests.support.machines import write_secret
from tests.support.network_hosts import Network, network_if_allowed
from tests.support.own_ports import own_port
from tests.support.service import Service
from tests.support.waits import WAIT_S, eventually

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.skipif(ON_DIRECTORY, reason="only on the service"),
]

_rng = random.Random(91)
PROMPTS = {
    name: [_rng.randrange(2, VOCABULARY) for _ in range(900)]
    for name in ("handed over", "hinted", "anyone's", "hung", "killed")
}
NOBODYS = [_rng.randrange(2, VOCABULARY) for _ in range(900)]
BLOCKS = whole_blocks(PROMPTS["hinted"]) // BLOCK_TOKENS


class Machines(NamedTuple):
    """Two services, an engine on each, and the first machine's address."""

    services: tuple[Service, Service]
    engines: tuple[Engine, Engine]
    source: str


@contextmanager
def two_machines(
    folder: Path, more: tuple[str, str] = ("", ""), network: Network | None = None
) -> Iterator[tuple[list[Service], list[str]]]:
    """Run two services of one cluster, on the first hosts of a network where there is one; yield them, and their
    addresses for each other. `more`: what each one's settings go on with, from those of its cluster."""
    addresses = [f"{host}:{own_port()}" for host in ("127.0.0.1", "127.0.0.2")]
    if network is not None:
        addresses = [f"{network.address(host)}:{CLUSTER_PORT}" for host in network.hosts]
    secret = write_secret(folder / "secret")
    with ExitStack() as stack:
        services = []
        for host, (address, own) in enumerate(zip(addresses, more, strict=True), 1):
            config = folder / f"{address}.toml"
            config.write_text(
                f"[cluster]\nlisten = '{address}'\npeers = {addresses}\nsecret_file = '{secret}'\n"
                f"match_wait_s = 1\n{own}"
            )
            with on_host(network, host):
                services.append(stack.enter_context(Service(mode="off", arguments=["--config", str(config)])))
        with kvfs.connect(services[1].data) as client:
            eventually(lambda: client.status()["cluster"]["peers_up"] == 1, "the machines are linked")
        yield services, addresses


def on_host(network: Network | None, host: int) -> AbstractContextManager[None]:
    """Have this thread, and what it starts, on a host; without a network where it is."""
    return nullcontext() if network is None else network.within(host)


def unmounted(service: Service) -> dict[str, Any]:
    """The connector's settings for a service without a mount."""
    return {**connector(service), "kv_connector_extra_config": {"address": str(service.data)}}


def fetched_blocks(service: Service) -> int:
    with kvfs.connect(service.data) as client:
        return int(client.status()["cluster"]["fetched_blocks"])


@pytest.fixture(scope="module")
def machines(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with ExitStack() as stack:
        found = stack.enter_context(network_if_allowed(2))
        network = found if isinstance(found, Network) else None
        folder = tmp_path_factory.mktemp("peers")
        services, addresses = stack.enter_context(two_machines(folder, network=network))
        running = []
        for host, name in enumerate(("first", "second"), 1):
            with on_host(network, host):
                engine = engines.start(name, None, connector=unmounted(services[host - 1]))
            running.append(stack.enter_context(engine))
        yield Machines((services[0], services[1]), (running[0], running[1]), addresses[0])


@pytest.fixture(scope="module")
def reference(machines: Machines) -> Run:
    """What the first engine computes, and stores: no prompt shares a block with another."""
    run = machines.engines[0].generate(PROMPTS, params={"do_remote_decode": True})
    assert run.cached_tokens == [0] * len(PROMPTS)
    return run


def ask(machines: Machines, name: str, params: dict[str, Any] | None = None) -> tuple[Run, dict[str, int]]:
    """The second engine's answer, and by how much its counts grew."""
    engine = machines.engines[1]
    before = engine.generate({}).counts
    named = {**(params or {}).get("kvfs", {}), "source": machines.source}
    run = engine.generate({name: PROMPTS[name]}, params={**(params or {}), "kvfs": named})
    return run, {count: value - before[count] for count, value in run.counts.items()}


def test_a_prompt_is_loaded_that_an_engine_on_another_machine_has_computed(
    machines: Machines, reference: Run
) -> None:
    before = fetched_blocks(machines.services[1])
    run, counts = ask(machines, "hinted")
    assert run.cached("hinted") == BLOCKS * BLOCK_TOKENS
    assert same_output(run.output("hinted"), reference.output("hinted"))
    assert counts == {**counts, "fetches": 1, "fetched_blocks": BLOCKS, "loaded_blocks": BLOCKS}
    assert fetched_blocks(machines.services[1]) - before == BLOCKS
    run, counts = ask(machines, "hinted")
    assert run.cached("hinted") == BLOCKS * BLOCK_TOKENS
    assert counts["fetches"] == 0, "now they are here"


def test_an_engine_that_fetches_of_any_machine_needs_no_word(
    engines: Engines, machines: Machines, reference: Run
) -> None:
    settings = unmounted(machines.services[1])
    settings["kv_connector_extra_config"]["fetch"] = "any"
    with engines.start("any", None, connector=settings) as engine:
        run = engine.generate({"anyone's": PROMPTS["anyone's"], "nobody's": NOBODYS})
    assert run.cached_tokens == [BLOCKS * BLOCK_TOKENS, 0]
    assert same_output(run.output("anyone's"), reference.output("anyone's"))
    assert run.counts == {**run.counts, "fetches": 2, "fetched_blocks": BLOCKS, "failed_fetches": 1}
    assert "no block was fetched" not in engine.log()


def test_a_hand_over_reaches_an_engine_on_another_machine(machines: Machines, reference: Run) -> None:
    params = reference.kv_transfer_params[reference.names.index("handed over")]
    assert params is not None
    run, counts = ask(machines, "handed over", params)
    assert counts == {**counts, "handovers": 1, "late_handovers": 0, "loaded_blocks": BLOCKS}
    assert same_output(run.output("handed over"), reference.output("handed over"))


def test_a_machine_that_hangs_or_is_killed_costs_a_bounded_wait(machines: Machines, reference: Run) -> None:
    first = machines.services[0]
    with first.paused():
        began_s = time.monotonic()
        run, counts = ask(machines, "hung")
        assert time.monotonic() - began_s < CONNECTOR_FETCH_S + WAIT_S
        assert counts == {**counts, "fetches": 1, "failed_fetches": 1, "loaded_blocks": 0}
        assert same_output(run.output("hung"), reference.output("hung"))
    first.kill()
    run, counts = ask(machines, "killed")
    assert counts == {**counts, "fetches": 1, "failed_fetches": 1, "loaded_blocks": 0}
    assert same_output(run.output("killed"), reference.output("killed"))
    assert machines.engines[1].log().count("no block was fetched") == 1
