"""Prompts, engine processes and their outputs, as the tests with vLLM share them."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.engines.run_engine import ENVIRONMENT
from tests.engines.tiny_llama import VOCABULARY
from tests.support.forked import Forked, Imported, imported
from tests.support.run_remains import held_memory
from tests.support.service import ROOT

BLOCK_TOKENS = 32
MAX_TOKENS = 32
END_WAIT_S = 30.0
REPLY_WAIT_S = 240.0
"""For an engine's start and its answers, which take 30 s beside other engines."""
_VLLM = (
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    # What an engine would import as it starts.
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.llama",
    "vllm.plugins.lora_resolvers.filesystem_resolver",
    "vllm.plugins.lora_resolvers.hf_hub_resolver",
    "vllm.renderers.hf",
    "vllm.triton_utils.dispatcher",
    "vllm.utils.cpu_triton_utils",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler",
)
_REPLIES = 100
"""The descriptor of an engine that its replies go to; lower ones may be its own."""
LOGPROB_TOLERANCE = 1e-3
"""Computing only the tail of a prompt sums in another order: differences of about 1e-5 were seen, where one
changed token makes at least 1e-2."""

_rng = random.Random(20)
BASE = [_rng.randrange(2, VOCABULARY) for _ in range(171)]
OTHER = [_rng.randrange(2, VOCABULARY) for _ in range(171)]
TAIL = [_rng.randrange(2, VOCABULARY) for _ in range(19)]

# The connector keys a prompt by its whole blocks, and never loads all of a prompt.
STORED = {
    "base 51": BASE[:51],
    "base 71, its prefix is stored too": BASE[:71],
    "base 101": BASE[:101],
    "base 171": BASE,
    "other 69": OTHER[:69],
    "other 135": OTHER[:135],
}
NEW_TAILS = {
    "blocks of base 71, another tail": BASE[:64] + TAIL,
    "blocks of base 171, another tail": BASE[:160] + TAIL[:7],
    "blocks of other 135, one token changed after them": [*OTHER[:134], 5],
}
MISSES = {
    "base 101, first token changed": [BASE[0] ^ 3, *BASE[1:101]],
    "under one block": OTHER[:31],
}
PROMPTS = {**STORED, **NEW_TAILS, **MISSES}
VARIANTS = {
    f"other 69, token {i} changed": [*OTHER[:i], (token + 17) % (VOCABULARY - 2) + 2, *OTHER[i + 1 : 69]]
    for i, token in enumerate(OTHER[:69])
}
"""One token changed, at each position in turn."""


@dataclass(frozen=True)
class Run:
    """One engine process: outputs by prompt, in the order of its prompts."""

    names: list[str]
    tokens: list[list[int]]
    logprobs: list[list[float]]
    cached_tokens: list[int]
    loaded: list[str]
    counts: dict[str, int] = field(default_factory=dict)
    block_tokens: int = 0
    """Of a block of attention, as vLLM chose it."""
    finish: list[str] = field(default_factory=list)
    kv_transfer_params: list[dict[str, Any] | None] = field(default_factory=list)
    """What each answer says to the engine that goes on with the prompt."""

    def output(self, name: str) -> tuple[list[int], list[float]]:
        index = self.names.index(name)
        return self.tokens[index], self.logprobs[index]

    def cached(self, name: str) -> int:
        return self.cached_tokens[self.names.index(name)]


def whole_blocks(prompt: list[int]) -> int:
    """Tokens of `prompt` that the connector stores and loads."""
    return (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def same_output(one: tuple[list[int], list[float]], two: tuple[list[int], list[float]]) -> bool:
    """The same tokens, each as likely."""
    near = all(abs(a - b) < LOGPROB_TOLERANCE for a, b in zip(one[1], two[1], strict=True))
    return one[0] == two[0] and near


# --- running the engine ------------------------------------------------------------------------------------
def vllm(python: str) -> Imported:
    """Return this run's process that has imported vLLM."""
    return imported(python, _VLLM, {**ENVIRONMENT, "PYTHONPATH": ""})


class Engine:
    """One engine process, for as long as the `with` block; it answers one list of prompts after another."""

    def __init__(self, python: str, work: Path, label: str, settings: Mapping[str, Any]) -> None:
        self._label = label
        self._log = work / f"{label}.log"
        source, sink = os.pipe()
        requests, begin = os.pipe()
        # kvfs itself only where its connector is asked for: ExampleConnector's engine is an unmodified program.
        path = [str(ROOT)] if settings.get("connector") else []
        with self._log.open("wb") as output:
            self._process = vllm(python).fork(
                [str(ROOT / "tests/engines/run_engine.py"), str(_REPLIES)],
                path=path,
                environment={**os.environ, "PYTHONPATH": ":".join(path), **settings.get("environment", {})},
                work=work,
                output=output,
                pass_fds={0: requests, _REPLIES: sink},
            )
        os.close(sink)
        os.close(requests)
        self._replies, self._requests = os.fdopen(source), os.fdopen(begin, "w")
        self._send(settings)

    def _send(self, message: Mapping[str, Any]) -> None:
        self._requests.write(json.dumps(message) + "\n")
        self._requests.flush()

    def generate(
        self,
        prompts: Mapping[str, Sequence[int]],
        *,
        max_tokens: int = MAX_TOKENS,
        params: Mapping[str, Any] | None = None,
    ) -> Run:
        """The outputs of `prompts`. A process that dies or hangs fails the test, with its log.

        `params`: the requests' `kv_transfer_params`.
        """
        request = {"prompts": list(prompts.values()), "max_tokens": max_tokens, "kv_transfer_params": params}
        answer = self._ask(request)
        sys.stderr.write(f"\nengine '{self._label}': peak {answer.pop('peak_mib')} MiB\n")
        return Run(list(prompts), **answer)

    def change_weights(self, factor: float, *, rank: int | None = None) -> None:
        """Change the weights where they are: by the reciprocal of `factor` (a power of 2), they are what they were."""
        assert any(self._ask({"change": factor, "rank": rank})["done"])

    def reset(self) -> bool:
        return bool(self._ask({"reset": True})["done"])

    def published_events(self) -> int:
        """Return how many KV events it has published."""
        return int(self._ask({"events": True})["published"])

    def log(self) -> str:
        return self._log.read_text()

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self._send(request)
        is_late = not select.select([self._replies], [], [], REPLY_WAIT_S)[0]
        if is_late:
            self._process.send_signal(signal.SIGABRT)  # it says where each of its threads is
        reply = "" if is_late else self._replies.readline()
        if not reply:  # it says why behind the end of its replies
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_WAIT_S)
        why = f"does not answer within {REPLY_WAIT_S:g} s" if is_late else "failed"
        assert reply, f"engine '{self._label}' {why}\n{self.log()[-16000:]}"
        return dict(json.loads(reply))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shared = shared_by(self._process)
        self._replies.close()
        self._requests.close()
        try:
            self._process.wait(END_WAIT_S if error is None else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for path in shared:  # vLLM leaves that of its ranks
            path.unlink(missing_ok=True)


def kill(process: Forked) -> None:
    """Kill an engine with all processes of its group, and remove what they shared, as they cannot any more."""
    group = [
        pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if _group(pid) == process.pid
    ]
    shared = held_memory(group)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for path in shared:
        path.unlink(missing_ok=True)


def shared_by(process: Forked) -> set[Path]:
    """Return the shared memory of an engine, which leads a group of processes."""
    pids = map(int, filter(str.isdecimal, os.listdir("/proc")))
    return held_memory(pid for pid in pids if _group(pid) == process.pid)


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


@dataclass(frozen=True)
class Engines:
    """Starts engine processes over one model."""

    python: str
    work: Path

    def start(self, label: str, storage: Path | None, *, prefix_caching: bool = False, **more: Any) -> Engine:
        """`more`: further settings of `run_engine.py`."""
        settings = {
            "model": str(self.work / "model"),
            "storage": None if storage is None else str(storage),
            "prefix_caching": prefix_caching,
            **more,
        }
        return Engine(self.python, self.work, label, settings)

    def run(
        self,
        label: str,
        prompts: Mapping[str, Sequence[int]],
        storage: Path | None,
        *,
        prefix_caching: bool = False,
    ) -> Run:
        """A process that answers one list of prompts."""
        with self.start(label, storage, prefix_caching=prefix_caching) as engine:
            return engine.generate(prompts)
