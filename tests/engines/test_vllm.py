"""vLLM, unmodified, stores its KV cache on the mount; another vLLM process loads it from there.

Four engine processes, two at a time, each of about 30 s and 1.8 GiB:

- **no cache**: every prompt computed, without a connector. The reference.
- **store**: stores the KV cache of some prompts in a bucket on the mount.
- **load**: a new process on the same bucket. It does not compute what the first stored (the engine's
  own count says so, and the files that it opened), and its outputs are those of the reference.
- **control**: as load, from a plain copy whose bytes were changed. Its outputs differ, so an
  equal output does prove equal bytes.
"""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.engines.engine import (
    BLOCK_TOKENS,
    MAX_TOKENS,
    MISSES,
    NEW_TAILS,
    PROMPTS,
    STORED,
    VARIANTS,
    Engines,
    Run,
    same_output,
    whole_blocks,
)
from tests.engines.tiny_llama import HEAD_DIM, KV_HEADS, LAYERS
from tests.support.door import ON_DIRECTORY

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PAGE_BYTES = 4096
FLOAT_BYTES = 4

# What was done to the plain copy of each stored prompt's directory.
CORRUPTED = {
    "base 101": "one page of one layer is zeros",
    "other 135": "the sign bits of one page of one layer are flipped",
    "base 171": "two layers' files are exchanged",
}


def payload_start(file: bytearray) -> int:
    """Where the tensor begins in a safetensors file."""
    return 8 + int.from_bytes(file[:8], "little")


def blank_page(path: Path) -> None:
    data = bytearray(path.read_bytes())
    start = payload_start(data) + PAGE_BYTES
    data[start : start + PAGE_BYTES] = bytes(PAGE_BYTES)
    path.write_bytes(data)


def flip_signs(path: Path) -> None:
    data = bytearray(path.read_bytes())
    start = payload_start(data)
    for byte in range(start + FLOAT_BYTES - 1, start + PAGE_BYTES, FLOAT_BYTES):
        data[byte] ^= 0x80
    path.write_bytes(data)


def exchange(one: Path, two: Path) -> None:
    third = one.with_suffix(".third")
    one.rename(third)
    two.rename(one)
    third.rename(two)


def directory_of(storage: Path, prompt: list[int]) -> Path:
    """The stored directory whose tensors have as many tokens as `prompt` has whole blocks."""
    from safetensors.numpy import load_file

    found = []
    for directory in storage.iterdir():
        tensor = load_file(sorted(directory.iterdir())[0])["kv_cache"]
        if len(tensor) == whole_blocks(prompt):
            found.append(directory)
    assert len(found) == 1, (found, whole_blocks(prompt))
    return found[0]


@pytest.fixture(scope="module")
def second_pair(engines: Engines, bucket: Path, store: Run, work: Path) -> tuple[Run, Run]:
    """The run that loads from the mount, and the one that loads from a copy with changed bytes."""
    copy = work / "copy"
    shutil.copytree(bucket / "kv", copy)
    blank_page(sorted(directory_of(copy, STORED["base 101"]).iterdir())[1])
    flip_signs(sorted(directory_of(copy, STORED["other 135"]).iterdir())[0])
    layers = sorted(directory_of(copy, STORED["base 171"]).iterdir())
    exchange(layers[0], layers[1])
    with ThreadPoolExecutor() as pool:
        load = pool.submit(engines.run, "load", PROMPTS, bucket / "kv")
        control = pool.submit(engines.run, "control", STORED, copy)
        return load.result(), control.result()


@pytest.fixture(scope="module")
def load(second_pair: tuple[Run, Run]) -> Run:
    return second_pair[0]


@pytest.fixture(scope="module")
def control(second_pair: tuple[Run, Run]) -> Run:
    return second_pair[1]


# --- what must hold ----------------------------------------------------------------------------------------
def test_every_token_of_the_prompt_changes_the_output(reference: Run) -> None:
    """Without this an equal output would prove nothing."""
    original = reference.output("other 69")
    outputs = {name: reference.output(name) for name in VARIANTS}
    same = [
        name for name, output in outputs.items() if output[0] == original[0] or same_output(output, original)
    ]
    assert same == []
    assert len(set(original[0])) > MAX_TOKENS // 4, "the output repeats itself"


def test_the_reference_computed_everything(reference: Run) -> None:
    assert set(reference.cached_tokens) == {0}
    assert reference.loaded == []


def test_the_first_engine_stored_one_file_per_layer(store: Run, bucket: Path) -> None:
    assert store.loaded == []
    sizes = sorted(len(list(directory.iterdir())) for directory in (bucket / "kv").iterdir())
    assert sizes[: len(STORED)] == [LAYERS] * len(STORED)
    bytes_per_token = 2 * KV_HEADS * HEAD_DIM * FLOAT_BYTES
    for directory in (bucket / "kv").iterdir():
        for file in directory.iterdir():
            data = bytearray(file.read_bytes())
            assert (len(data) - payload_start(data)) % (BLOCK_TOKENS * bytes_per_token) == 0, file


@pytest.mark.parametrize("name", STORED)
def test_storing_does_not_change_the_output(store: Run, reference: Run, name: str) -> None:
    assert same_output(store.output(name), reference.output(name))


@pytest.mark.parametrize("name", [*STORED, *NEW_TAILS])
def test_the_second_engine_loads_what_the_first_stored(load: Run, name: str) -> None:
    assert load.cached(name) == whole_blocks(PROMPTS[name])


@pytest.mark.parametrize("name", MISSES)
def test_the_second_engine_computes_what_nobody_stored(load: Run, name: str) -> None:
    assert load.cached(name) == 0


def test_the_second_engine_read_the_files_of_the_mount(load: Run, bucket: Path) -> None:
    assert len(load.loaded) == LAYERS * (len(STORED) + len(NEW_TAILS))
    assert {str(Path(path).parent.parent) for path in load.loaded} == {str(bucket / "kv")}


@pytest.mark.skipif(ON_DIRECTORY, reason="only on the service")
def test_the_mount_counted_the_loads(load: Run) -> None:
    hits = {path: int(os.getxattr(path, "user.kvfs.hits")) for path in load.loaded}
    assert min(hits.values()) > 0
    assert sum(hits.values()) >= len(load.loaded)


@pytest.mark.parametrize("name", PROMPTS)
def test_loaded_blocks_give_the_output_of_computed_ones(load: Run, reference: Run, name: str) -> None:
    assert same_output(load.output(name), reference.output(name))


@pytest.mark.parametrize("name", CORRUPTED)
def test_changed_bytes_change_the_output(control: Run, reference: Run, name: str) -> None:
    assert control.cached(name) == whole_blocks(PROMPTS[name])
    assert control.output(name)[0] != reference.output(name)[0], CORRUPTED[name]


@pytest.mark.parametrize("name", [name for name in STORED if name not in CORRUPTED])
def test_the_unchanged_part_of_the_copy_does_not(control: Run, reference: Run, name: str) -> None:
    assert control.cached(name) == whole_blocks(PROMPTS[name])
    assert same_output(control.output(name), reference.output(name))
