# Everything sets up `.venv` by itself, once, and again when the requirements change.
# `make demo` does the main job on ResNet-50; `make test` runs the tests, `make test-fast` those that take seconds. PYTHON=... picks another interpreter.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(shell for candidate in python3.11 python3.12 python3.13 python3; do \
	if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	command -v $$candidate; break; fi; done)
BIN := .venv/bin
STAMP := .venv/.installed
GPU_PYTHON ?= $(if $(wildcard $(STAMP)),$(BIN)/python,python3)
DEMO := demo
PYTEST_ARGS ?= -n 2
# What a developer runs all the time: the core without the frameworks, processes and commands around it.
FAST := $(addprefix tests/,analysis devices executor ir machine packing planner profiler schedule simulator torchtools)

.PHONY: help setup demo test test-fast test-all sweeps docs simulated-cuda simulated-cuda-tests gpu gpu-wheels lint format check clean

help:
	@echo "make demo    profile ResNet-50, plan it at 60% of its memory, train it under the plan, draw the result"
	@echo "make test    run the tests but for the sweeps (PYTEST_ARGS='tests/planner -q' to choose)"
	@echo "make test-fast  those of the core that take seconds, to be run all the time"
	@echo "make test-all   with the sweeps too: frameworks, many processes, every operator"
	@echo "make sweeps  these alone (POOCH_SWEEP_SECONDS=N: those that N seconds suffice for, others for each commit)"
	@echo "make simulated-cuda        the main job on a simulated CUDA device of 1 GiB under PyTorch's own CUDA build: no GPU"
	@echo "                           needed, 6 minutes, after setting up build/simulated_cuda (6 GB, 2 to 4 minutes)"
	@echo "make simulated-cuda-tests  all tests that need a CUDA device, on the simulated one"
	@echo "make gpu     all that needs an NVIDIA GPU, in 20 minutes, into build/gpu (GPU_ARGS='--output DIR'; exit code 3:"
	@echo "             nothing failed, but not everything was run). Sets nothing up: GPU_PYTHON=python3, .whl/ if it is there"
	@echo "make gpu-wheels  fill .whl/ with the packages that a machine without a network lacks"
	@echo "make docs    the documentation as a site, in build/site"
	@echo "make lint    ruff: lint and format check"
	@echo "make check   mypy and the import rules"
	@echo "make format  let ruff rewrite what it can"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer was not found: install it or give make PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt
	touch $@

demo: $(STAMP)
	mkdir -p $(DEMO)
	$(BIN)/pooch optimize resnet50 --budget 60% --check --hard-limit --output $(DEMO) --force
	$(BIN)/pooch show $(DEMO)/plan.json --profile $(DEMO)/profile.json --plot $(DEMO)/plan.png --force
	@echo "The picture is $(DEMO)/plan.png; the profile and the plan are beside it."

# Workers that compute on all cores wait for one another. tests/sweeps.txt lists what takes long and repeats.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not sweep" $(PYTEST_ARGS)

test-fast: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not sweep and not slow and not seconds" $(PYTEST_ARGS) $(FAST)

test-all: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

sweeps: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m sweep $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

check: $(STAMP)
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(STAMP)
	$(BIN)/mkdocs build --strict --quiet
	@echo "The site is build/site/index.html."

simulated-cuda: $(STAMP)
	$(BIN)/python -m tests.simulated_cuda.main_job

simulated-cuda-tests: $(STAMP)
	$(BIN)/python -m tests.simulated_cuda.suite

gpu:
	PYTHONPATH=. $(GPU_PYTHON) -m benchmarks.gpu $(GPU_ARGS)

gpu-wheels:
	PYTHONPATH=. $(GPU_PYTHON) -m benchmarks.gpu.wheels

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv $(DEMO) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
