"""XXH3-64 as the kernel computes it, by its twin in C on the stand-in; tests/gpu runs the kernel."""

from __future__ import annotations

import array
import ctypes
import hashlib
import random
import subprocess
import sys
from pathlib import Path

import pytest

import kvfs._native.cuda as room
from kvfs._native.cuda.driver import Context
from kvfs._native.hash.hashing import xxh3_64

KERNELS = Path(room.__file__).parent / "kernels"
PTX = KERNELS / "xxh3.ptx"
COMPILE = Path(__file__).resolve().parents[2] / "packaging/ptx"
SIZES = [241, 1023, 1024, 1025, 1088, 1089, 2048, 2049, 4096, 40_000, 65_536, 100_003]


def test_the_hash_of_a_device_is_the_stores(context: Context) -> None:
    objects = [random.Random(size).randbytes(size) for size in SIZES]
    buffers = [ctypes.create_string_buffer(data, len(data)) for data in objects]
    addresses = array.array("Q", map(ctypes.addressof, buffers))
    sizes, hashes = array.array("Q", SIZES), array.array("Q", bytes(8 * len(SIZES)))
    module, stream = context.load_module(PTX.read_bytes()), context.stream()
    arguments = [one.buffer_info()[0] for one in (addresses, sizes, hashes)]
    module.launch("kvfs_xxh3", stream, len(SIZES), 256, arguments)
    stream.synchronize()
    assert list(hashes) == [xxh3_64(data) for data in objects]


def test_the_ptx_is_of_these_sources() -> None:
    sources = b"".join(path.read_bytes() for path in sorted(KERNELS.glob("*.[ch]*")))
    assert PTX.read_text().splitlines()[0] == f"// sources: {hashlib.sha256(sources).hexdigest()}"


def test_the_kernels_compile_to_the_same_ptx(tmp_path: Path) -> None:
    nvrtc = pytest.importorskip("nvidia.cuda_nvrtc", reason="without NVRTC kernels are not compiled again")
    library = next(Path(nvrtc.__path__[0]).glob("lib/libnvrtc.so.*"))
    subprocess.run([sys.executable, str(COMPILE), str(library), str(tmp_path)], check=True)
    assert (tmp_path / "xxh3.ptx").read_bytes() == PTX.read_bytes()
