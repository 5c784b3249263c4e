# `make` lists the targets. Everything happens in $(VENV), which `setup` makes once and keeps in
# step with pyproject.toml and constraints.txt.

PYTHON ?= python3
VENV ?= .venv
# Passed to pip, e.g. PIP_ARGS="--extra-index-url URL" for builds without CUDA.
PIP_ARGS ?=
# Passed to pytest, e.g. PYTEST_ARGS="-m 'not slow' tests/unit".
PYTEST_ARGS ?=
# Processes that share the tests; 0 is none beside pytest's own. Two are enough, as many tests start
# processes themselves; on one GPU they would be in each other's way.
WORKERS ?= $(if $(wildcard /dev/nvidiactl),0,2)

BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done

.DEFAULT_GOAL := help
.PHONY: help setup test sanitize check format demo bench clean

help:  ## List the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

setup: $(STAMP)  ## Make the virtual environment and install everything into it

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed; name one with PYTHON=...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --constraint constraints.txt $(PIP_ARGS) torch
	$(BIN)/python -m pip install --constraint constraints.txt $(PIP_ARGS) --editable '.[dev]'
	@touch $@

test: setup  ## Run all tests
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(PYTEST_ARGS)

# Without torch's cache every tensor is an allocation of its own, whose ends the tool knows; graphs
# cannot be captured so. What fails on purpose runs in processes of its own, which are left alone.
SANITIZER := compute-sanitizer --tool memcheck --error-exitcode 9 --target-processes application-only
SANITIZED := $(filter-out tests/kernels/test_gpu_%,$(wildcard tests/kernels/test_*.py))

sanitize: setup  ## Run the kernels' GPU tests under compute-sanitizer, where it is installed
	@command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not installed: it comes with the CUDA toolkit" >&2; exit 1; }
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZER) $(BIN)/python -m pytest -o timeout=0 -m gpu -k 'not captured' $(PYTEST_ARGS) $(SANITIZED)

check: setup  ## Lint, format, types, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --verbose

format: setup  ## Format the code and fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: setup  ## Conversations that survive pressure, kill -9 and a restart (about two minutes)
	$(BIN)/python examples/demo.py

bench: setup  ## Run all benchmarks
	$(BIN)/python -m benchmarks.run

clean:  ## Remove the virtual environment, caches and build outputs
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .coverage
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
