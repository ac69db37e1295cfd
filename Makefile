# kvfs: `make serve` runs the service, `make test` passes the tests; each does its own set-up on a fresh Debian
# or Ubuntu machine (apt packages where they are missing, .venv, native modules) and does nothing twice.
#
#   make build           .venv/bin/kvfs that works
#   make serve           the service in the foreground: mount ./mnt, data ./data   (ARGS="--dram 4GiB" adds flags)
#   make test            lint, types, import contracts, stubs, tests               (ARGS="-k names" for pytest)
#   make wheel           dist/*.whl for each Python that is here, of 3.11 to 3.13    (WHEEL_PYTHONS="3.12 /path/to/python")
#   make test-wheel      each wheel in a fresh environment, as a client of a service
#   make test-asan       native tests with checks of memory and undefined behaviour; test-tsan: of data races
#   make test-rig        what needs NVMe over Fabrics, RDMA or two NUMA nodes, in a virtual machine
#   make test-gpu        tests/gpu on this machine's GPU, with the PYTHON that is there (docs/hardware.md)
#   make fuzz            the native parsers against changed bytes                  (FUZZ_S=20 SEED=n)
#   make soak            new seeds for all that draws, red ones to ./soak          (SOAK_S=3600 ARGS="--only crash,faults")
#   make routing-runs    the default routing against the others on 200 drawn runs  (ARGS="--seed n --runs 20 --jobs 2")
#   make engines         the environment of the tests against real engines (.venv-engines)
#   make test-engines    the tests against real engines                            (ARGS="-k vllm" for pytest)
#   make bench           ratios against the physical limit                         (ARGS="--only mount.pread_1m")
#   make bench-peers     kvfs proxy beside released routers                         (ARGS="--seconds 10")
#   make clean           removes everything that was built, environments too; never ./data
#
# PYTHON=/path/to/python picks another Python (>= 3.11). TORCH= leaves PyTorch out; its tests then skip.

SHELL := /bin/sh
.DELETE_ON_ERROR:
.SUFFIXES:

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
TORCH ?= torch==2.13.0
CLANG ?= $(shell command -v clang)
CLANG_FORMAT ?= $(shell command -v clang-format)
export PYTHON

# Each step of the set-up says that it begins; what takes long in it says how far it is, on a terminal.
QUIET := $(shell test -t 2 || echo -qq)
PIP := $(BIN)/python -m pip install $(QUIET)
# What builds kvfs, and pyfuse3, which has no wheels and is version 0.0.0 without setuptools-scm.
BUILT_WITH := 'setuptools>=77' 'setuptools-scm>=8' 'cython>=3.1,<4'
EDITABLE := KVFS_NATIVE_APART=1 $(PIP) --no-build-isolation --editable
NATIVE := $(wildcard kvfs/_native/*/*.pyx kvfs/_native/*/*.pxd kvfs/_native/*/*.c kvfs/_native/*/*.h)
FORMATTED := $(wildcard kvfs/_native/*/*.[ch] kvfs/_native/*/*/*.[ch] tests/native/*.c tests/native/*/*.c tests/cuda/standin/*.[ch] tests/hbm/standin/*.c)
GUARDED := $(shell grep -lwE 'kvfs_lock|REQUIRES' kvfs/_native/*/*.c)
# Recursive: what is built is known once it is. UCX's is built where its headers are.
NATIVE_MODULES = $(filter-out $(if $(wildcard kvfs/_native/remote/ucx.*.so),,kvfs._native.remote.ucx), \
    $(subst /,.,$(basename $(wildcard kvfs/_native/*/*.pyx))))

.PHONY: help build serve wheel test test-wheel test-asan test-tsan test-rig test-gpu fuzz soak routing-runs checks lint annotations types imports stubs pytest bench bench-peers clean
help:
	@sed -n 's/^#   //p' Makefile

include engines.mk

# A .venv whose Python is gone (an upgraded system) is built anew.
$(shell [ ! -d $(VENV) ] || $(BIN)/python -c '' 2>/dev/null || rm -rf $(VENV))

# --- set-up: one stamp per step, so that a second run calls neither apt nor pip ------------------------------
$(STAMPS)/system: packaging/system
	@echo 'kvfs: set-up, 1 of 4: system packages' >&2
	@packaging/system packages build
	@mkdir -p $(STAMPS) && touch $@

# The programs that tests run, and UCX's headers: native modules that were built before them are built again.
UCX := $(STAMPS)/ucx
has_ucx = @! echo '\#include <ucp/api/ucp.h>' | cc -E - >/dev/null 2>&1 || [ -e $(UCX) ] || touch $(UCX)
$(STAMPS)/system-test: packaging/system | $(STAMPS)/venv
	@packaging/system packages test
	$(has_ucx)
	@touch $@

$(STAMPS)/venv: | $(STAMPS)/system
	@echo 'kvfs: set-up, 2 of 4: $(VENV)' >&2
	python=$$(packaging/system python) && "$$python" -m venv --clear $(VENV)
	$(PIP) --upgrade 'pip>=24' $(BUILT_WITH)
	@mkdir -p $(STAMPS) && touch $(STAMPS)/system $@

$(STAMPS)/install: pyproject.toml setup.py setup.cfg | $(STAMPS)/venv
	@echo 'kvfs: set-up, 3 of 4: Python packages' >&2
	$(EDITABLE) '.[server]'
	@touch $@

$(STAMPS)/native: $(NATIVE) setup.py $(STAMPS)/install $(wildcard $(STAMPS)/ucx)
	@echo 'kvfs: set-up, 4 of 4: native modules' >&2
	$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

$(STAMPS)/dev: $(STAMPS)/install
	$(EDITABLE) '.[dev]' $(TORCH)
	@touch $@

# What figures are measured against, and what those of the cold tier, the directory and the Conductor need.
$(STAMPS)/bench: packaging/system pyproject.toml $(STAMPS)/install
	@packaging/system packages bench
	$(EDITABLE) '.[server,cold,cluster,events]'
	@touch $@

build: $(STAMPS)/native

# For environments that are not the service's: engines, other clients (docs/install.md).
WHEEL_PYTHONS ?= 3.11 3.12 3.13
wheel: $(STAMPS)/system
	packaging/wheel $(WHEEL_PYTHONS)

test-wheel: wheel $(STAMPS)/dev $(STAMPS)/native
	KVFS_TEST_WHEELS="$(WHEEL_PYTHONS)" $(BIN)/pytest tests/packaging $(ARGS)

# --- run -----------------------------------------------------------------------------------------------------
serve: build
	@exec $(BIN)/kvfs serve --mount mnt --data data $(ARGS)

bench: build $(STAMPS)/bench
	@exec $(BIN)/kvfs bench $(ARGS)

# The releases are in an environment apart from kvfs's own.
PEERS_VENV := .venv-peers
bench-peers: build $(STAMPS)/bench
	@exec $(BIN)/python -m bench.peer_routers --environment $(PEERS_VENV) $(ARGS)

# --- check ---------------------------------------------------------------------------------------------------
# What is checked without being run takes what tests, which also wait, leave of the processors: it says at its end what it found.
test: | $(STAMPS)/system-test $(STAMPS)/dev $(STAMPS)/native
	@$(MAKE) --jobs 2 checks pytest

checks:
	@chrt --idle 0 $(MAKE) --output-sync=recurse lint types imports stubs

lint: $(STAMPS)/dev annotations
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(if $(CLANG_FORMAT),$(CLANG_FORMAT) --dry-run -Werror $(FORMATTED),@echo 'lint: without clang-format C is not checked')

# Locks against what they guard: kvfs/_native/shared/mutex.h says why as C++.
annotations:
	$(if $(CLANG),for file in $(GUARDED); do \
	    $(CLANG) -x c++ -std=gnu++20 -D_GNU_SOURCE -DKVFS_HAVE_URING -Ikvfs/_native -Wno-everything -Wthread-safety -Werror \
	        -fsyntax-only $$file || exit 1; done,@echo 'annotations: without clang the locks are not checked')

types: $(STAMPS)/dev $(STAMPS)/native
	$(BIN)/mypy

imports: $(STAMPS)/dev
	$(BIN)/lint-imports

stubs: $(STAMPS)/dev $(STAMPS)/native
	$(if $(NATIVE_MODULES),$(BIN)/stubtest --mypy-config-file pyproject.toml \
	    --allowlist packaging/stubtest.allow --ignore-unused-allowlist $(NATIVE_MODULES))

# Of two processors two leave a third idle once nothing is built beside them, while they wait for disks and for what takes a
# second. -n 0 in ARGS for output as it comes.
TEST_WORKERS ?= 3

# Processes of tests import what others have imported: with bytecode that is not kept they compile it each time, vLLM's modules
# in 11 s of processor time.
pytest test-wheel test-asan test-tsan test-engines soak: export PYTHONDONTWRITEBYTECODE :=

pytest: $(STAMPS)/dev $(STAMPS)/native | $(STAMPS)/system-test
	$(BIN)/pytest -m "not engine" -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

# In a virtual machine (packaging/rig), some twenty times slower: without the plugins and fixtures that these do not use.
$(STAMPS)/system-rig: packaging/system packaging/rig | $(STAMPS)/system
	@packaging/system packages rig
	$(has_ucx)
	@packaging/rig true || [ $$? != 1 ] # a machine in which nothing runs is none that is not there: its tests fail
	@touch $@

RIG_TESTS ?= tests/rig
test-rig: export RIG_S ?= 600
test-rig: $(STAMPS)/dev | $(STAMPS)/system-rig
	@$(MAKE) $(STAMPS)/native
	packaging/rig env PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 PYTHONDONTWRITEBYTECODE=1 \
	    $(CURDIR)/$(BIN)/python -m pytest -q --noconftest -p pytest_trio.plugin -p pytest_timeout -p no:cacheprovider \
	    --color=no --durations 5 $(RIG_TESTS) $(ARGS)

# On images for GPUs, whose Python has what is built for their driver: no .venv, no packages installed.
GPU_PYTHON = $(or $(PYTHON),python3)
test-gpu:
	$(GPU_PYTHON) setup.py --quiet build_ext --inplace --parallel "$$(nproc)"
	KVFS_TEST_GPU=1 $(GPU_PYTHON) -m pytest -n 0 --confcutdir=tests/gpu -p no:cacheprovider tests/gpu $(ARGS)

# Native code under sanitizers, out of tree (packaging/sanitized); FUZZ_S seconds for each fuzz target.
FUZZ_S ?= 20
# tests/native, and of other rooms what reaches furthest, for its time, into the modules that those leave out.
ASAN_TESTS := tests/native tests/cuda/test_copies.py tests/cuda/test_driver.py \
    tests/foundation/test_index_buckets.py tests/foundation/test_index_file.py tests/foundation/test_index_model.py \
    tests/foundation/test_index_names.py tests/foundation/test_index_rows.py \
    tests/nvme/test_stored_objects.py tests/recovery/test_edge_records.py tests/remote/test_fabric.py \
    tests/remote/test_rogues.py tests/remote/test_transfer.py tests/sessions/test_native_seals.py
ASAN_TESTS += tests/client/test_weights.py::test_a_sample_differs_exactly_if_a_line_that_is_read_does
ASAN_TESTS += tests/foundation/test_keys.py::test_a_continued_chain_equals_one_call
ASAN_TESTS += tests/foundation/test_keys.py::test_all_widths_hash_alike
ASAN_TESTS += tests/scheduler/conductor/test_planners.py::test_native_decisions_equal_the_python_ones_over_a_generated_trace
ASAN_TESTS += tests/recovery/test_adoption_order.py::test_any_first_part_of_what_is_dear_can_be_used
# Native threads beside the event loop's. No test that forks a process which has threads: ThreadSanitizer follows none there.
TSAN_TESTS := $(wildcard tests/native/test_fuse_*.py) tests/native/test_checksummer.py tests/native/test_sealer.py \
    tests/native/test_tls_sessions.py tests/native/test_uring.py tests/remote/test_fabric.py \
    tests/remote/test_rogues.py tests/remote/test_transfer.py
test-asan: $(STAMPS)/dev | $(STAMPS)/system-test
	packaging/sanitized asan $(CURDIR)/$(BIN)/python -q -n 2 $(ASAN_TESTS) $(ARGS)

test-tsan: $(STAMPS)/dev | $(STAMPS)/system-test
	packaging/sanitized tsan $(CURDIR)/$(BIN)/python -q -n 2 $(TSAN_TESTS) $(ARGS)

fuzz: $(STAMPS)/dev | $(STAMPS)/system-test
	packaging/fuzz $(BIN)/python $(FUZZ_S) $(SEED)

# What checks a change draws the same twice; this draws anew until it is ended, or for SOAK_S seconds.
soak: $(STAMPS)/dev $(STAMPS)/native | $(STAMPS)/system-test
	@exec $(BIN)/python -m tests.support.run_soak $(ARGS)

routing-runs: $(STAMPS)/dev $(STAMPS)/native
	nice -n 15 $(BIN)/python -m tests.support.routing_runs $(ARGS)

clean:
	rm -rf $(VENV) $(ENGINES_VENV) $(PEERS_VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -f kvfs/_native/*/*.so
	find . -name __pycache__ -type d -not -path './mnt/*' -not -path './data/*' -prune -exec rm -rf {} +
