# kvfs: `make serve` runs the service, `make test` passes the tests; each does its own set-up on a fresh Debian
# or Ubuntu machine (apt packages where they are missing, .venv, native modules) and does nothing twice.
#
#   make build           .venv/bin/kvfs that works
#   make serve           the service in the foreground: mount ./mnt, data ./data   (ARGS="--dram 4GiB" adds flags)
#   make test            lint, types, import contracts, stubs, tests               (ARGS="-k names" for pytest)
#   make soak            thousands of kills, power cuts, faults (ARGS="-k kill" for pytest, KVFS_TEST_SEED=n again)
#   make test-engines    the tests against real engines, in an environment of their own
#   make bench           ratios against the physical limit                         (ARGS="--only mount.pread_1m")
#   make clean           removes everything that was built, never ./data
#
# PYTHON=/path/to/python picks another Python (>= 3.11). TORCH= leaves PyTorch out; its tests then skip.

SHELL := /bin/sh
.DELETE_ON_ERROR:
.SUFFIXES:

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
TORCH ?= torch==2.13.0
export PYTHON

NATIVE := $(wildcard kvfs/_native/*.pyx kvfs/_native/*.pxd kvfs/_native/*_*.c kvfs/_native/*.h)
NATIVE_MODULES := $(patsubst kvfs/_native/%.pyx,kvfs._native.%,$(wildcard kvfs/_native/*.pyx))

.PHONY: help build serve test soak lint types imports stubs pytest bench clean
help:
	@sed -n 's/^#   //p' Makefile

include engines.mk

# A .venv whose Python is gone (an upgraded system) is built anew.
$(shell [ ! -d $(VENV) ] || $(BIN)/python -c '' 2>/dev/null || rm -rf $(VENV))

# --- set-up: one stamp per step, so that a second run calls neither apt nor pip ------------------------------
$(STAMPS)/system: packaging/system
	@packaging/system packages build
	@mkdir -p $(STAMPS) && touch $@

# The programs that tests run.
$(STAMPS)/system-test: packaging/system | $(STAMPS)/system
	@packaging/system packages test
	@touch $@

$(STAMPS)/venv: | $(STAMPS)/system
	python=$$(packaging/system python) && "$$python" -m venv --clear $(VENV)
	$(BIN)/python -m pip install -qq --upgrade 'pip>=24' 'setuptools>=77' 'cython>=3.1,<4'
	@mkdir -p $(STAMPS) && touch $(STAMPS)/system $@

$(STAMPS)/install: pyproject.toml setup.py setup.cfg | $(STAMPS)/venv
	$(BIN)/python -m pip install -qq --editable .
	@touch $@

$(STAMPS)/native: $(NATIVE) setup.py $(STAMPS)/install
	$(BIN)/python setup.py --quiet build_ext
	@touch $@

$(STAMPS)/dev: $(STAMPS)/install
	$(BIN)/python -m pip install -qq --editable '.[dev]' $(TORCH)
	@touch $@

build: $(STAMPS)/native

# --- run -----------------------------------------------------------------------------------------------------
serve: build
	@exec $(BIN)/kvfs serve --mount mnt --data data $(ARGS)

bench: build
	@exec $(BIN)/kvfs bench $(ARGS)

# --- check ---------------------------------------------------------------------------------------------------
test: lint types imports stubs pytest

lint: $(STAMPS)/dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(STAMPS)/dev $(STAMPS)/native
	$(BIN)/mypy

imports: $(STAMPS)/dev
	$(BIN)/lint-imports

stubs: $(STAMPS)/dev $(STAMPS)/native
	$(if $(NATIVE_MODULES),$(BIN)/stubtest --mypy-config-file pyproject.toml \
	    --allowlist packaging/stubtest.allow --ignore-unused-allowlist $(NATIVE_MODULES))

# The load test of the S3 endpoint takes a minute where nobody waits for it.
KVFS_TEST_LOAD_S ?= $(if $(CI),60,8)
pytest: export KVFS_TEST_LOAD_S := $(KVFS_TEST_LOAD_S)
pytest: $(STAMPS)/dev $(STAMPS)/native | $(STAMPS)/system-test
	$(BIN)/pytest -m "not engine" $(ARGS)

KVFS_TEST_KILLS ?= 4000
KVFS_TEST_CUTS ?= 2000
KVFS_TEST_FAULTS ?= 600
soak: export KVFS_TEST_KILLS := $(KVFS_TEST_KILLS)
soak: export KVFS_TEST_CUTS := $(KVFS_TEST_CUTS)
soak: export KVFS_TEST_FAULTS := $(KVFS_TEST_FAULTS)
soak: $(STAMPS)/dev $(STAMPS)/native | $(STAMPS)/system-test
	$(BIN)/pytest -s --timeout 14400 tests/test_43_store_power_cuts.py tests/test_44_store_faults.py \
	    tests/test_76_crash_harness.py tests/test_99_gateway_abuse.py $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -f kvfs/_native/*.so $(patsubst %.pyx,%.c,$(wildcard kvfs/_native/*.pyx))
	find . -name __pycache__ -type d -not -path './mnt/*' -not -path './data/*' -prune -exec rm -rf {} +
