"""The native modules: one `.pyx` per C file, because their compiler flags do not fit in pyproject.toml."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

NATIVE = Path("kvfs/_native")
FLAGS = [
    "-O3",
    "-std=gnu11",
    "-D_GNU_SOURCE",
    "-Wall",
    "-Wextra",
    "-Wno-unused-function",
    "-fvisibility=hidden",
    "-pthread",
]
URING_PROGRAM = """
#include <liburing.h>
int main(void) { return IORING_SETUP_DEFER_TASKRUN && io_uring_register_buffers_sparse(0, 0); }
"""
"""Compiles with liburing 2.3 or newer."""


def has_uring() -> bool:
    """Whether the device module can be built with io_uring; without, storage devices are driven by threads."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    command = [*compiler, "-D_GNU_SOURCE", "-Werror", "-fsyntax-only", "-xc", "-"]
    found = subprocess.run(command, input=URING_PROGRAM, text=True, capture_output=True).returncode == 0
    if not found:
        print("kvfs: liburing.h (2.3 or newer) is missing: built without io_uring", file=sys.stderr)
    return found


URING = {"define_macros": [("KVFS_HAVE_URING", "1")], "libraries": ["uring"]} if has_uring() else {}


def native_module(pyx: Path) -> Extension:
    """`name.pyx` is compiled together with its `name_*.c` (`name.c` is Cython's output)."""
    sources = sorted(NATIVE.glob(f"{pyx.stem}_*.c"))
    options = URING if pyx.stem == "device" else {}
    return Extension(
        f"kvfs._native.{pyx.stem}",
        [str(pyx), *map(str, sources)],
        depends=[str(path) for path in NATIVE.glob("*.h")],
        extra_compile_args=FLAGS,
        extra_link_args=["-pthread"],
        **options,
    )


setup(
    ext_modules=cythonize(
        [native_module(pyx) for pyx in sorted(NATIVE.glob("*.pyx"))],
        compiler_directives={"language_level": "3str", "boundscheck": False, "wraparound": False},
    )
)
