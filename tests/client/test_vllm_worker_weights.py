"""A vLLM worker whose weights change, or another rank's: loads and stores end until the next epoch."""

from __future__ import annotations

import pytest

from tests.support.service import Service
from tests.support.vllm_workers import (
    NAMES,
    Told,
    Worker,
    cache,
    device,
    keys_of,
    namespace_of,
    patient,
    plan,
    run_of,
    service,
    standin_path,
    watch_of,
    weights,
)
from tests.support.waits import eventually

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.mount

__all__ = ["device", "patient", "service", "standin_path"]


def test_other_weights_end_loads_and_stores_until_the_next_epoch(
    service: Service, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    namespace, model = namespace_of(f"weights {device}"), weights()
    first, second, third = (keys_of(namespace, 2, seed) for seed in (1, 2, 3))
    worker = Worker(service, cache(8), namespace, is_async=True, watch=watch_of(model))
    worker.store(run_of(first, [1, 2]))
    worker.settle(2)
    with torch.no_grad():
        model[1].bias[7] += 1
    worker.store(run_of(second, [3, 4]))
    assert worker.transfers.ended_epoch == 0
    assert worker.load(run_of(first, [8, 9])) == ({"request"}, {8, 9})
    with torch.no_grad():
        model[1].bias[7] -= 1
    worker.store(run_of(second, [3, 4]))
    assert worker.load(run_of(first, [8, 9])) == ({"request"}, {8, 9}), "what came in between is not known"
    worker.settle(6)
    counts = worker.transfers.counts
    assert (counts["stored_blocks"], counts["dropped_blocks"], counts["weights_changed"]) == (2, 4, 1)
    assert len([record for record in caplog.records if "weights in memory" in record.message]) == 1
    # The engine resets, ends its last requests, and then changes the weights.
    assert worker.load(epoch=1) == (set(), set())
    with torch.no_grad():
        model[1].bias[7] += 3
    worker.store(run_of(third, [5, 6]), epoch=1)
    worker.settle(8)
    assert worker.load(run_of(third, [10, 11]), epoch=1) == ({"request"}, set())
    assert worker.transfers.ended_epoch is None
    with service.client() as client, client.blocks(namespace) as blocks:
        assert [blocks.match(keys) for keys in (first, second, third)] == [2, 0, 2]
    worker.transfers.close()


def test_the_weights_of_an_epoch_are_those_that_compute_first_in_it(service: Service) -> None:
    namespace, model = namespace_of("computes"), weights()
    worker = Worker(service, cache(11), namespace, is_async=True, watch=watch_of(model))
    worker.transfers.enter(plan(computes=True, epoch=1))
    with torch.no_grad():
        model[0].weight[3] *= 2
    worker.store(run_of(keys_of(namespace, 1), [1]), epoch=1)
    assert worker.transfers.counts["dropped_blocks"] == 1
    assert worker.transfers.ended_epoch == 1
    worker.transfers.close()


def test_a_load_that_ends_in_another_epoch_has_failed(service: Service, device: str) -> None:
    namespace = namespace_of(f"epochs {device}")
    keys = keys_of(namespace, 2)
    worker = Worker(service, cache(9), namespace, is_async=True, watch=watch_of(weights()))
    worker.store(run_of(keys, [1, 2]))
    worker.settle(2)
    worker.transfers.begin(plan(loads=[run_of(keys, [8, 9])]))
    assert worker.load(epoch=1) == ({"request"}, {8, 9})
    worker.transfers.close()


@pytest.mark.parametrize("by_layer", [True, False])
def test_what_another_ranks_weights_made_wrong_is_not_stored(
    service: Service, device: str, by_layer: bool
) -> None:
    """The other rank finds its weights changed while this one computes: told before this one's step ends."""
    namespace, peers = namespace_of(f"ranks {device} {by_layer}"), Told()
    keys = keys_of(namespace, 3)
    worker = Worker(service, cache(10), namespace, is_async=True, watch=watch_of(weights(), peers))
    step = plan(stores=[run_of(keys, [1, 2, 3])])
    worker.transfers.enter(step)
    for name in NAMES if by_layer else ():
        worker.transfers.save_layer(step, name)
    peers.notify("epoch 0")
    worker.transfers.finish(step)
    worker.settle(3)
    assert worker.transfers.counts["dropped_blocks"] == 3
    assert worker.transfers.ended_epoch == 0
    worker.transfers.close()
    with service.client() as client:
        eventually(lambda: client.status()["open_drafts"] == 0, "no draft stays behind")
        with client.blocks(namespace) as blocks:
            assert blocks.match(keys) == 0
