"""What weights are, in files and in memory: samples, names that do not depend on where things lie."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfs._native.hash.sampler import LINE_BYTES, lines_read, sample
from kvfs.connectors.common import (
    architecture_of,
    config_digest,
    new_epoch,
    string_keys,
    string_namespace,
    weights_revision,
)
from kvfs.errors import InvalidRequest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")


def digest(areas: list[Any], budget: int) -> bytes:
    return sample([area.ctypes.data for area in areas], [area.nbytes for area in areas], budget)


# --- samples of memory ---------------------------------------------------------------------------------------
@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 40 * LINE_BYTES), max_size=8), st.integers(1, 64))
def test_the_places_of_a_sample(sizes: list[int], budget: int) -> None:
    """Each area has its share, spread evenly: at most the budget, and at least one line of each."""
    chosen = lines_read(sizes, budget)
    whole = [-(-size // LINE_BYTES) for size in sizes]
    shares = [len(lines) for lines in chosen]
    assert sum(shares) <= max(budget, sum(lines > 0 for lines in whole))
    for lines, count in zip(chosen, whole, strict=True):
        assert len(lines) == min(count, max(shares, default=0)), (
            "small ones are read whole, others share alike"
        )
        for number, line in enumerate(lines):
            assert number * count // len(lines) <= line < (number + 1) * count // len(lines)
    if sum(whole) <= budget:
        assert shares == whole


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_sample_differs_exactly_if_a_line_that_is_read_does(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 30 * LINE_BYTES), min_size=1, max_size=4))
    budget = data.draw(st.integers(1, 80))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    areas = [rng.integers(0, 256, size, dtype=np.uint8) for size in sizes]
    chosen, before = lines_read(sizes, budget), digest(areas, budget)
    at = data.draw(st.integers(0, len(areas) - 1))
    byte = data.draw(st.integers(0, sizes[at] - 1))
    areas[at][byte] ^= 1 << data.draw(st.integers(0, 7))
    assert (digest(areas, budget) != before) == (byte // LINE_BYTES in chosen[at])


def test_an_even_step_would_miss_whole_columns() -> None:
    """One column of 64 bytes changes in a matrix whose rows are a whole number of lines."""
    matrix = np.zeros((1024, 1024), dtype=np.uint8)
    before = digest([matrix], 512)
    for column in range(0, 1024, LINE_BYTES):
        matrix[:, column : column + LINE_BYTES] = 1
        assert digest([matrix], 512) != before, column
        matrix[:, column : column + LINE_BYTES] = 0


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="1 addresses and 2 sizes"):
        sample([0], [1, 2], 1)
    with pytest.raises(InvalidRequest, match="area 0: 5 bytes at no address"):
        sample([0], [5], 1)
    assert sample([], [], 1) == sample([0], [0], 1)


# --- models --------------------------------------------------------------------------------------------------
def make_model() -> Any:
    """With every kind of tensor: other orders of memory, tied, empty, nowhere, buffers that are not saved."""
    torch.manual_seed(5)
    model = torch.nn.Module()
    model.first = torch.nn.Linear(300, 200)
    model.second = torch.nn.Linear(200, 300, bias=False)
    model.second.weight = torch.nn.Parameter(torch.randn(200, 300).to(torch.bfloat16).t())
    model.tied = model.first
    model.register_buffer("scale", torch.tensor(2.0))
    model.register_buffer("cache", torch.zeros(4), persistent=False)
    model.none = torch.nn.Parameter(torch.empty(0))
    model.nowhere = torch.nn.Parameter(torch.empty(5, device="meta"))
    model.strided = torch.nn.Parameter(torch.randn(8, 70)[:, :64], requires_grad=False)
    return model


def sample_of(model: Any, *, all_buffers: bool = False) -> bytes:
    from kvfs.connectors.memory import sample as sample_tensors
    from kvfs.connectors.memory import tensors_of

    return sample_tensors(tensors_of(model, all_buffers=all_buffers))


def test_equal_models_have_equal_samples_and_every_tensor_counts() -> None:
    from kvfs.connectors.memory import tensors_of

    model = make_model()
    before = sample_of(model)
    assert sample_of(make_model()) == before
    with torch.no_grad():
        for name, tensor in tensors_of(model, all_buffers=False):
            if not tensor.is_meta and tensor.numel():
                tensor.mul_(-1)
                assert sample_of(model) != before, name
                tensor.mul_(-1)
                assert sample_of(model) == before, name
        model.cache += 1
        assert sample_of(model) == before
        assert sample_of(model, all_buffers=True) != sample_of(make_model(), all_buffers=True)
    model.first.weight.data = model.first.weight.data * 2  # the same parameter, other memory
    assert sample_of(model) != before


def test_memory_of_a_device_is_read_at_the_same_places() -> None:
    from kvfs.connectors import memory

    areas = [
        memory._area(tensor)
        for _, tensor in memory.tensors_of(make_model(), all_buffers=True)
        if not tensor.is_meta
    ]
    sizes = [area.nbytes for area in areas]
    for budget in (1, 300, 1 << 20):
        lines = torch.cat(list(memory._gathered(areas, lines_read(sizes, budget))))
        gathered = sample([lines.data_ptr()], [lines.nbytes], lines.nbytes)
        assert gathered == sample([area.data_ptr() for area in areas], sizes, budget)


def test_matrices_that_nobody_can_read_count_by_what_stands_for_them() -> None:
    from kvfs.connectors.vllm_weights import Watch

    model, told = make_model(), list[str]()
    peers = SimpleNamespace(notify=told.append, was_notified=lambda what: False)
    model.first.cpu_linear = lambda x: x
    watch = Watch(lambda: [model], peers)  # type: ignore[arg-type]
    assert watch.look()
    model.first.cpu_linear = lambda x: x  # packed anew
    assert not watch.look()
    assert (told, watch.changes) == (["epoch 0"], 1)
    watch.enter(1)
    assert watch.look()
    model.first.cpu_linear = lambda x: x
    assert not watch.look()


def test_without_a_worker_the_weights_are_not_guessed() -> None:
    from kvfs.connectors.vllm_weights import calling_worker, models_of

    with pytest.raises(InvalidRequest, match="no worker of vLLM"):
        calling_worker()

    class Worker:
        def get_model(self) -> Any:
            return weights

        def get_draft_model(self) -> None:
            return None

        def register(self) -> Any:
            return calling_worker()

    weights = make_model()
    assert models_of(Worker().register()) == [weights]


# --- files ---------------------------------------------------------------------------------------------------
def test_names_do_not_depend_on_where_things_lie(tmp_path: Path) -> None:
    """Two directories with equal files are one model."""

    def config(directory: Path) -> Any:
        fields = {
            "hidden_size": 8,
            "_name_or_path": str(directory),
            "text_config": {"_name_or_path": str(directory)},
        }
        return SimpleNamespace(
            architectures=["LlamaForCausalLM"],
            model_type="llama",
            name_or_path=str(directory),
            to_json_string=lambda: json.dumps(fields),
        )

    found = set()
    for name in ("one", "two"):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(b"weights" * 1000)
        found.add(
            (
                weights_revision(directory),
                config_digest(config(directory)),
                architecture_of(config(directory)),
            )
        )
    assert len(found) == 1
    assert architecture_of(SimpleNamespace(model_type="llama")) == "llama"


def test_an_epoch_sets_keys_of_strings_apart() -> None:
    namespace, epochs = string_namespace("kind"), {"", new_epoch(), new_epoch()}
    keys = {string_keys(namespace, ["key"], epoch)[0] for epoch in epochs}
    assert len(keys) == len(epochs) == 3
