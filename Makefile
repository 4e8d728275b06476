# `make demo` is all that a fresh clone needs: the first target that wants the environment builds it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test coverage test-lowest sweep fuzz lint format bench modes widths padded generation points against bench-gpu docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# torch first: nothing that is installed afterwards may replace it.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -c constraints.txt torch
	@$(BIN)/python -m pip install -c constraints.txt -e ".[dev]"
	@touch $@

demo: $(STAMP) ## run the quickstart
	@$(BIN)/python examples/quickstart.py
	@echo
	@echo "The itnet command is in $(BIN). To have it at hand: source $(BIN)/activate"

lint: $(STAMP) ## check style and formatting
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

# Two workers with one thread each: torch would otherwise start a full set of threads in every worker.
test: lint ## lint, then run the tests
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

# Reports to the terminal and to outputs/coverage. Slower than `make test`, as every line is counted.
coverage: $(STAMP) ## run the tests and measure how much of modeling_itnet and itnet_kernels they run
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --cov --cov-report=term --cov-report=html:outputs/coverage

# A second environment: the lowest Python and the lowest versions that pyproject.toml allows. Gigabytes on Linux, where
# PyPI has torch with CUDA only; no GPU is needed.
LOWEST := .venv-lowest
LOWEST_PYTHON ?= python3.11
$(LOWEST)/.installed: pyproject.toml constraints-lowest.txt
	@$(LOWEST_PYTHON) -m venv $(LOWEST)
	@$(LOWEST)/bin/python -m pip install -c constraints-lowest.txt torch
	@$(LOWEST)/bin/python -m pip install -c constraints-lowest.txt -e ".[dev]"
	@touch $@

test-lowest: $(LOWEST)/.installed ## run the tests with the lowest versions that pyproject.toml allows (slow)
	@OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest -n 2

sweep: $(STAMP) ## run the tests under every CPU capability, with 1 and 2 threads, in random orders (slow)
	@$(BIN)/python tests/sweep.py

fuzz: $(STAMP) ## compare random cases with an oracle in float64; CASES=20000 SEED=0
	@$(BIN)/python tests/fuzz/run.py --cases $(or $(CASES),2000) --seed $(or $(SEED),0)

bench: $(STAMP) ## measure speed and memory of the operator
	@$(BIN)/python kernels/benchmarks/run.py

modes: $(STAMP) ## measure whole models in every integration mode beside attention (slow)
	@$(BIN)/python -m pip install -q -c constraints.txt -e ".[bench]"
	@$(BIN)/python kernels/benchmarks/run.py --modes

widths: $(STAMP) ## measure exact models by kernel width beside a ViT
	@$(BIN)/python kernels/benchmarks/run.py --widths

padded: $(STAMP) ## measure padded beside unpadded text
	@$(BIN)/python kernels/benchmarks/run.py --padded

generation: $(STAMP) ## measure decoding, caches and training steps of causal models beside GPT-2 and Mamba
	@$(BIN)/python kernels/benchmarks/run.py --generation

points: $(STAMP) ## measure near and far fields on 100,000 points: seconds and memory
	@$(BIN)/python kernels/benchmarks/run.py --points 100000

against: $(STAMP) ## measure the operator here and in another checkout, in turns; DIR=../before
	@$(BIN)/python kernels/benchmarks/run.py --against "$(DIR)"

bench-gpu: $(STAMP) ## on a GPU: check every kernel, then time operators and models; MINUTES=10
	@$(BIN)/python kernels/benchmarks/bench_gpu.py --minutes $(or $(MINUTES),10)

# One thread, as the guides are small. What is generated is in docs/generated, which is not part of the repository.
docs: $(STAMP) ## build the documentation into outputs/docs/html, and run its guides
	@rm -rf docs/generated/api
	@OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -W --keep-going -q -d outputs/docs/doctrees docs outputs/docs/html
	@echo "outputs/docs/html/index.html"

format: $(STAMP) ## apply the formatter and the safe lint fixes
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

clean: ## delete caches and build products (the environment stays)
	@rm -rf build dist outputs/docs docs/generated .pytest_cache .ruff_cache .hypothesis .coverage* .import_linter_cache
	@find . -path './$(VENV)*' -prune -o \( -name __pycache__ -o -name '*.egg-info' \) -type d -exec rm -rf {} +
