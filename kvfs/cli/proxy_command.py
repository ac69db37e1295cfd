"""`kvfs proxy`: OpenAI's interface in front of engines.

Responsibility: arguments in, one call of `scheduler.proxy`, text out; errors are those of `kvfs.cli.main`.
Concurrency: none; it runs a trio loop until it ends.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import trio
import typer

from kvfs.cli.lazy import load as load_module
from kvfs.config.load import load
from kvfs.config.settings import ConductorSettings, ProxySettings, Settings
from kvfs.config.url_settings import host_and_port
from kvfs.errors import ConfigError
from kvfs.http.server import Certificate
from kvfs.system.notify import set_up_logging
from scheduler.conductor.planning.planner import Role
from scheduler.proxy.proxy import ProxyOptions, run
from scheduler.proxy.upstream.engines import EngineAddress

app = typer.Typer()


@app.command()
def proxy(
    listen: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Where clients ask.")] = None,
    engine: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="An engine that prefills and decodes; repeatable.")
    ] = None,
    prefill: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="An engine that prefills; repeatable.")
    ] = None,
    decode: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="An engine that decodes; repeatable.")
    ] = None,
    hand_over: Annotated[
        str | None,
        typer.Option(help="store, nixl, mooncake or sglang: how a prompt gets from one to the other."),
    ] = None,
    conduct: Annotated[
        bool | None,
        typer.Option("--conduct", help="Follow the engines' caches by a Conductor in this process."),
    ] = None,
    conductor: Annotated[
        str | None, typer.Option(metavar="URL", help="A Conductor elsewhere that routes.")
    ] = None,
    instances: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="JSON file of instances for a Conductor in this process."),
    ] = None,
    events: Annotated[
        str | None, typer.Option(metavar="ENDPOINT", help="Where publishers of KV events connect to that.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="TOML configuration, with the tokens.")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
) -> None:
    """Serve OpenAI's interface in front of engines, until Ctrl-C or SIGTERM."""
    flags = {
        ("proxy", "listen"): listen,
        ("proxy", "engines"): engine or None,
        ("proxy", "prefill"): prefill or None,
        ("proxy", "decode"): decode or None,
        ("proxy", "hand_over"): hand_over,
        ("proxy", "conduct"): conduct,
        ("proxy", "conductor"): conductor,
        ("conductor", "instances"): instances,
        ("conductor", "events"): events,
        ("log", "level"): log_level,
    }
    _serve(load(config, flags))


def _serve(settings: Settings) -> None:
    set_up_logging(settings.log.level)
    options = proxy_options(settings)
    host, port = host_and_port(settings.proxy.listen)
    scheme = "http" if settings.proxy.certificate is None else "https"

    def started(port: int) -> None:
        print(f"OpenAI   {scheme}://{host or '*'}:{port}/v1\nready", flush=True)

    with ExitStack() as stack:
        service = None
        if routes_itself(settings):
            # Its packages are of another extra.
            kind = load_module("scheduler.conductor.door.conductor_service").ConductorService
            service = stack.enter_context(kind(conductor_settings(settings)))
        trio.run(run, options, host, port, started, service)


def routes_itself(settings: Settings) -> bool:
    """Return whether a Conductor runs in the proxy's process."""
    own = settings.conductor
    is_told = own.instances is not None or bool(own.asked) or settings.proxy.conduct
    return is_told and not settings.proxy.conductor


def conductor_settings(settings: Settings) -> ConductorSettings:
    """Return the settings of the Conductor in the process, which trusts whom the proxy does.

    With `conduct` it asks the proxy's engines. Raises ConfigError where it has others of its own.
    """
    proxy = settings.proxy
    own = settings.conductor.model_copy(
        update={"authorities": settings.conductor.authorities or proxy.authorities}
    )
    if not proxy.conduct:
        return own
    if own.asked:
        raise ConfigError(
            "[proxy] conduct: its engines are asked in place of those of [conductor]: name them once"
        )
    return own.model_copy(update={"engines": proxy.engines, "prefill": proxy.prefill, "decode": proxy.decode})


def _check_bootstraps(settings: ProxySettings) -> None:
    """Check that all bootstrap servers are of engines that are named. Raises ConfigError."""
    named = {*settings.engines, *settings.prefill, *settings.decode}
    strange = next((url for url in settings.bootstraps if url not in named), None)
    if strange is not None:
        raise ConfigError(f"[proxy] bootstraps: {strange!r} is none of engines, prefill and decode")


def proxy_options(given: Settings) -> ProxyOptions:
    """Make a proxy's options of a configuration. Raises ConfigError without engines, and for a bootstrap server of one
    that nobody can name later."""
    settings = given.proxy
    roles: tuple[tuple[Role, tuple[str, ...]], ...] = (
        ("both", settings.engines),
        ("prefill", settings.prefill),
        ("decode", settings.decode),
    )
    addresses = [EngineAddress(url, role) for role, urls in roles for url in urls]
    if not settings.conductor and not routes_itself(given):
        _check_bootstraps(settings)
    is_routed = settings.conductor or (routes_itself(given) and not settings.conduct)
    if not settings.engines and not settings.decode and not is_routed:
        raise ConfigError("[proxy] has no engines that decode: --engine URL, or --prefill URL --decode URL")
    certificate = None
    if settings.certificate is not None and settings.key is not None:
        certificate = Certificate(settings.certificate, settings.key)
    return ProxyOptions(
        engines=() if settings.conduct else addresses,  # a Conductor names those that it has
        hand_over=settings.hand_over,
        bootstraps=settings.bootstraps,
        bearer_tokens=[token.get_secret_value() for token in settings.tokens],
        certificate=certificate,
        connections=settings.connections,
        conductor=settings.conductor,
        authorities=settings.authorities,
        conductor_token=settings.conductor_token.get_secret_value()
        or os.environ.get("KVFS_CONDUCTOR_TOKEN", ""),
    )
