"""The native modules: one `.pyx` per C file, because their compiler flags do not fit in pyproject.toml."""

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


def native_module(pyx: Path) -> Extension:
    """`name.pyx` is compiled together with its `name_*.c` (`name.c` is Cython's output)."""
    sources = sorted(NATIVE.glob(f"{pyx.stem}_*.c"))
    return Extension(
        f"kvfs._native.{pyx.stem}",
        [str(pyx), *map(str, sources)],
        depends=[str(path) for path in NATIVE.glob("*.h")],
        extra_compile_args=FLAGS,
        extra_link_args=["-pthread"],
    )


setup(
    ext_modules=cythonize(
        [native_module(pyx) for pyx in sorted(NATIVE.glob("*.pyx"))],
        compiler_directives={"language_level": "3str", "boundscheck": False, "wraparound": False},
    )
)
