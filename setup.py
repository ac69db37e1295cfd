"""The native modules: each a `.pyx` over C files, because their compiler flags do not fit in pyproject.toml."""

import itertools
import multiprocessing
import os
import shlex
import subprocess
import sys
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NATIVE = Path("kvfs/_native")
FLAGS = [
    "-O3",
    "-g1",  # names and lines for stack traces; with the interpreter's own -g, loop.pyx takes 5.5 s to compile, not 3.6
    "-std=gnu11",
    "-D_GNU_SOURCE",
    "-Wall",
    "-Wextra",
    "-Wno-unused-function",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-pthread",
]
URING_PROGRAM = """
#include <liburing.h>
int main(void) { return IORING_SETUP_DEFER_TASKRUN && io_uring_register_buffers_sparse(0, 0); }
"""
"""Compiles with liburing 2.3 or newer."""
UCX_PROGRAM = """
#include <ucp/api/ucp.h>
_Static_assert(UCP_API_VERSION >= UCP_VERSION(1, 13), "UCX 1.13");
int main(void) { return 0; }
"""
"""Compiles with UCX 1.13 or newer."""


SANITIZE = shlex.split(os.environ.get("KVFS_SANITIZE", ""))
"""Flags of packaging/sanitized, to compile and to link with."""
COPY = "KVFS_NATIVE_COPY" in os.environ
"""A wheel gets what this Python has in place, which who says so has just built: in 5 s, not 110 of processor time."""


def compiles(program: str) -> bool:
    compiler = shlex.split(os.environ.get("CC", "cc"))
    command = [*compiler, "-D_GNU_SOURCE", "-Werror", "-fsyntax-only", "-xc", "-"]
    return subprocess.run(command, input=program, text=True, capture_output=True).returncode == 0


def has_uring() -> bool:
    """Whether the device module can be built with io_uring; without, storage devices are driven by threads."""
    found = compiles(URING_PROGRAM)
    if not found:
        print("kvfs: liburing.h (2.3 or newer) is missing: built without io_uring", file=sys.stderr)
    return found


URING = {"define_macros": [("KVFS_HAVE_URING", "1")], "libraries": ["uring"]} if has_uring() else {}


LIBRARIES = {
    "device.uring": URING,
    "cuda.driver": {"libraries": ["dl"]},
    "s3.fast_path": {"libraries": ["crypto"]},
    "remote.tls": {"libraries": ["ssl", "crypto"]},
    "remote.ucx": {"libraries": ["ucp", "ucs"]},
}
MODULES = {
    "shared.table": ["table_core"],
    "shared.slots": ["slots_core"],
    "shared.name_scan": [],
    "blocks.pieces": [],
    "blocks.reader": ["reader_core", "reader_stream", "pool"],
    "blocks.writer": ["writer_core", "writer_avx2", "pool"],
    "seal.sealer": ["sealer_core"],
    "seal.checksummer": ["checksummer_core"],
    "hash.hashing": ["hashing_core", "sha256"],
    "hash.sampler": ["sampler_core"],
    "fuse.loop": [
        *("threads", "state", "handlers", "mutations", "upcalls", "dentries", "readdir", "locks", "replies"),
        *("write_order", "awake"),
    ],
    "s3.fast_path": ["answer", "head", "sigv4"],
    "s3.receiver": ["receiver_core", "receiver_avx2", "crc64"],
    "hbm.hazards": ["hazards_core"],
    "remote.server": ["serve_core", "serve_requests", "serve_blocks", "wire_core"],
    "remote.stream": [
        "stream_core",
        "wire_core",
        "../s3/receiver_core",
        "../s3/receiver_avx2",
        "../s3/crc64",
    ],
    "remote.tls": ["tls_core"],
    "remote.ucx": ["ucx_core"],
    "evict.policy": ["policy_core", "learner", "shadow", "memory", "order", "runs", "baselines", "replay"],
    "catalog.block_index": ["catalog_core"],
    "catalog.adoption": ["adoption_core"],
    "cluster.index": ["index_core", "segments", "holder_sets", "windows_core"],
    "cluster.route": ["route_core", "legs_core", "queues_core"],
    "catalog.records": [],
    "catalog.logged_names": [],
    "catalog.object_names": [],
    "catalog.restore": [],
    "device.uring": ["uring_core"],
    "cuda.driver": ["driver_core"],
    "cuda.copies": ["copies_core"],
}
"""Module -> the C files beside its `.pyx`, or in another room, that it is made of."""
if not compiles(UCX_PROGRAM):
    # Nobody needs it but a service with [cluster] transport = "ucx", which says so.
    del MODULES["remote.ucx"]


UTILITY_CODE = "kvfs._native.shared._kvfs_utility_code"
"""What Cython would write into each module that needs it: memoryviews, of which gcc compiles one copy in 4 s. It is in
sys.modules by its last name alone too, which is therefore nobody else's."""


def native_module(name: str, sources: list[str]) -> Extension:
    return Extension(
        name,
        sources,
        depends=[str(path) for path in NATIVE.glob("*/*.h")],
        include_dirs=[str(NATIVE)],
        extra_compile_args=[*FLAGS, *SANITIZE],
        extra_link_args=["-pthread", *SANITIZE],
        **LIBRARIES.get(name.removeprefix("kvfs._native."), {}),
    )


def native_modules() -> list[Extension]:
    modules = [native_module(UTILITY_CODE, [f"{UTILITY_CODE.replace('.', '/')}.c"])]
    for name, sources in MODULES.items():
        seam = NATIVE / name.replace(".", "/")
        paths = [seam.with_suffix(".pyx"), *(seam.parent / f"{source}.c" for source in sources)]
        modules.append(native_module(f"kvfs._native.{name}", [str(path) for path in paths]))
    return cythonize(
        modules,
        shared_utility_qualified_name=UTILITY_CODE,
        build_dir=os.environ.get("KVFS_CYTHON_DIR", "build/cython"),
        # Another start method runs this file again in each process.
        nthreads=len(os.sched_getaffinity(0)) if multiprocessing.get_start_method() == "fork" else 0,
        compiler_directives={"language_level": "3str", "boundscheck": False, "wraparound": False},
    )


class BuildModules(build_ext):
    """Build the modules, saying on a terminal which one begins."""

    _begun = itertools.count(1)

    def build_extension(self, ext):
        if sys.stderr.isatty():
            # In one piece: several threads build.
            sys.stderr.write(f"kvfs: {next(self._begun)} of {len(self.extensions)}: {ext.name}\n")
        module = Path(self.get_ext_filename(ext.name))
        if self.inplace or not COPY or not module.exists():
            super().build_extension(ext)
        else:
            self.copy_file(str(module), self.get_ext_fullpath(ext.name))


APART = "KVFS_NATIVE_APART" in os.environ
"""An editable install compiles everything anew, each time; the Makefile has it leave that to its own `build_ext`."""

setup(ext_modules=[] if APART else native_modules(), cmdclass={"build_ext": BuildModules})
