"""A vLLM worker with caches on a device: steps do not wait for its copies, and what it does not copy is dropped."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfs._native.cuda.driver import open_driver
from tests.support.cuda_standin import Standin
from tests.support.service import Service
from tests.support.vllm_workers import (
    BLOCKS,
    NAMES,
    STANDIN,
    STREAMS,
    Worker,
    assert_all_there,
    cache,
    keys_of,
    namespace_of,
    patient,
    run_of,
    service,
    standin_path,
)

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.mount

__all__ = ["patient", "service", "standin_path"]


@pytest.fixture
def standin(standin_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Standin]:
    """A device for caches, with registered memory for five blocks at first."""
    from kvfs.connectors.device import buffers, stores
    from kvfs.connectors.vllm_layout import KVLayout

    monkeypatch.setattr(KVLayout, "is_on_cpu", property(lambda _: False))
    monkeypatch.setattr(buffers, "CONNECTOR_STAGING_BYTES", 4096)
    monkeypatch.setattr(stores, "CONNECTOR_STAGING_BUFFERS", 1)
    made = Standin(standin_path)
    made.set_faults()
    STANDIN.append(open_driver(made.path).devices()[0].retain_context())
    STREAMS.append(STANDIN[0].stream())
    yield made
    made.set_faults()
    made.hold(False)
    STREAMS.clear()
    STANDIN.clear()


def test_a_step_ends_while_its_copies_wait_and_the_next_one_writes_after_them(
    service: Service, standin: Standin
) -> None:
    namespace = namespace_of("held")
    source, other, keys = cache(18), cache(19), keys_of(namespace, BLOCKS)
    held = {name: layer.clone() for name, layer in source.items()}
    worker = Worker(service, source, namespace, is_async=True)
    standin.hold(True)
    worker.store(run_of(keys[: 16 * 7], list(range(7))))
    worker.store(run_of(keys[16 * 7 :], list(range(7, BLOCKS))))
    storages = [layers[NAMES[0]].untyped_storage() for layers in (source, other)]
    STREAMS[0].copy(storages[0].data_ptr(), storages[1].data_ptr(), storages[0].nbytes())
    assert worker.transfers.counts["stored_blocks"] == 0
    assert torch.equal(source[NAMES[1]], held[NAMES[1]])
    standin.hold(False)
    worker.settle(BLOCKS)
    assert_all_there(service, namespace, keys, held)
    STREAMS[0].synchronize()
    assert torch.equal(source[NAMES[1]], other[NAMES[1]])
    worker.transfers.close()


class NoMemory:
    """The module `mmap` where the kernel has no memory."""

    PAGESIZE = mmap.PAGESIZE

    @staticmethod
    def mmap(*_: Any) -> Any:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


@pytest.mark.parametrize(
    "fault",
    [
        "mmap",
        "cuMemHostRegister:2:1",
        "cuLaunchKernel:2:1",
        "cuStreamWaitEvent:2:2",
        "cuEventSynchronize:719:2",
        "sticky:719:4",
    ],
)
def test_what_a_device_does_not_copy_is_dropped_and_logged_once(
    service: Service,
    standin: Standin,
    fault: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kvfs.connectors.device import buffers

    namespace = namespace_of(fault)
    source, keys = cache(20), keys_of(namespace, 9)
    worker = Worker(service, source, namespace, is_async=True)
    counts = worker.transfers.counts
    standin.set_faults(fault)
    with monkeypatch.context() as patch:
        if fault == "mmap":
            patch.setattr(buffers, "mmap", NoMemory)
        worker.store(run_of(keys[: 16 * 6], list(range(6))))
        worker.settle(6)
    assert (counts["stored_blocks"], counts["dropped_blocks"]) == (0, 6)
    worker.store(run_of(keys[16 * 6 :], [6, 7, 8]))
    worker.settle(9)
    is_lost = fault.startswith("sticky")
    assert (counts["stored_blocks"], counts["dropped_blocks"]) == ((0, 9) if is_lost else (3, 6))
    assert worker.transfers.stores._kept_bytes == 0
    assert len([record for record in caplog.records if "the device" in record.message]) == 1
    with service.client() as client, client.blocks(namespace) as blocks:
        assert blocks.exists(keys) == [False] * 6 + [not is_lost] * 3
    worker.transfers.close()
