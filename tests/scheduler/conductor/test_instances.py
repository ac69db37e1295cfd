"""Instances that come and go: one that is dead and comes back, those that a file lists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trio

from scheduler.conductor.feeds import listener
from scheduler.conductor.feeds.discovery import InstancesFile
from scheduler.conductor.planning.planner import Role
from scheduler.conductor.values import Instance
from tests.support.conductors import instance, serving
from tests.support.door_requests import given
from tests.support.held_ports import HeldPort
from tests.support.waits import until


async def test_a_dead_instance_is_passed_over_and_noticed_when_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listener, "PROBE_INTERVAL_S", 0.05)
    answers = 0

    async def metrics(stream: trio.SocketStream) -> None:
        nonlocal answers
        await stream.receive_some(4096)
        body = b"process_start_time_seconds 5\nvllm:num_requests_running 3\n"
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        await stream.send_all(head.encode() + body)
        answers += 1

    with HeldPort() as port:
        async with serving(health=True) as (service, _), trio.open_nursery() as nursery:
            service.add(instance("a", url=f"http://127.0.0.1:{port.number}"))

            def shown() -> dict[str, Any]:
                return dict(service.conductor.status()["instances"][0])

            await until(lambda: not shown()["reachable"])
            [found] = await trio.open_tcp_listeners(port.number, host="127.0.0.1")
            nursery.start_soon(trio.serve_listeners, metrics, [found])
            await until(lambda: bool(shown()["reachable"]))
            assert answers > 0
            await until(lambda: shown()["active_requests"] == 3)
            nursery.cancel_scope.cancel()


class Registrar:
    def __init__(self) -> None:
        self.names: list[str] = []
        self.labels: dict[str, Role] = {}

    def add(self, instance: Instance) -> None:
        self.names.append(instance.name)

    def remove(self, name: str) -> None:
        self.names.remove(name)

    def role(self, name: str) -> Role:
        return self.labels.get(name, "both")

    def set_role(self, name: str, role: Role) -> None:
        self.labels[name] = role


def test_a_file_of_instances_is_followed_and_a_wrong_one_changes_nothing(tmp_path: Path) -> None:
    file, registrar = tmp_path / "instances.json", Registrar()
    follower = InstancesFile(file, registrar)
    follower.look()
    file.write_text(json.dumps([given("a"), given("b")]))
    follower.look()
    assert registrar.names == ["a", "b"]
    file.write_text("[{")
    follower.look()
    assert registrar.names == ["a", "b"]
    registrar.add(instance("by-hand"))
    file.write_text(json.dumps([given("b", role="decode"), given("c")]))
    follower.look()
    assert registrar.names == ["by-hand", "b", "c"]
    registrar.labels["c"] = "decode"
    file.write_text(json.dumps([given("b", role="decode"), given("c", weights="others")]))
    follower.look()
    assert registrar.role("c") == "decode", "the file says nothing new of its role"
