# Every target first creates the virtual environment with pinned versions that it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TYPING := build/typing
SOURCE_TREE := build/source-tree
PACKAGES := build/packages

export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
# Tests start hundreds of processes, and each would compile all modules if none wrote bytecode.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help install demo test test-slow test-packages record-packages test-gpu benchmark-gpu gpu-acceptance source-tree lint types benchmarks clean

help:
	@echo "make demo        score text with the demo model, its experts streamed; then send a request to a server"
	@echo "make install     create a virtual environment in $(VENV) with pinned versions (other targets do this first)"
	@echo "make test        run ruff, mypy and the fast tests (5 to 7 minutes on 2 cores)"
	@echo "make test-slow   run the slow tests (60 to 90 minutes on 2 cores; TEST_SEED=7 draws other random cases, TEST_TIMES=10"
	@echo "                 ten times as many)"
	@echo "make test-packages  run MoE layers, decoders and clients of other projects; installs them in $(PACKAGES)"
	@echo "                 (make record-packages writes the results into docs/)"
	@echo "make test-gpu    run the tests that need a CUDA device and a CUDA build of torch; make benchmark-gpu measures"
	@echo "make gpu-acceptance  check on a GPU in ten minutes: attention, server, memory, ranks, CUDA graphs, kernels, threshold"
	@echo "                 (with PYTHON_GPU=python3 these three use that Python and its packages, and install nothing)"
	@echo "make lint        run ruff only"
	@echo "make types       run mypy only"
	@echo "make benchmarks  run all benchmarks of docs/results"
	@echo "make clean       remove everything that the other targets created"

install: $(INSTALLED)

# Install torch first and pinned; as a dependency of other packages, pip would choose the newest build.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt setuptools wheel
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e ".[dev]"
	@touch $(INSTALLED)

demo: $(INSTALLED)
	@$(BIN)/moepass demo

test: lint types
	$(BIN)/python -m pytest -m "not slow and not gpu and not packages" -n 2

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -m slow -n 2 $(if $(TEST_TIMES),--timeout 0)

test-packages: $(PACKAGES)/.installed
	PYTHONPATH=$(PACKAGES) $(BIN)/python -m pytest tests/packages

record-packages: $(PACKAGES)/.installed
	PYTHONPATH=$(PACKAGES) $(BIN)/python -m tests.helpers.packages.record_packages $(NAMES)

# Installed in a separate folder, because these packages require other versions of torch.
$(PACKAGES)/.installed: $(INSTALLED) tests/packages/requirements.txt
	@rm -rf $(PACKAGES)
	DS_BUILD_OPS=0 BUILD_CUDA_EXT=0 $(BIN)/python -m pip install --quiet --no-deps --no-build-isolation \
		--target $(PACKAGES) -r tests/packages/requirements.txt
	@touch $@

# A Python with a CUDA build of torch and the packages needs no environment and no network:
# make test-gpu PYTHON_GPU=python3. Its tests, benchmarks and checks import the source tree through links that form the
# package.
ifdef PYTHON_GPU
GPU_NEEDS := source-tree
GPU_PYTHON := PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR)/$(SOURCE_TREE):$(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH)) $(PYTHON_GPU)
else
GPU_NEEDS := $(INSTALLED)
GPU_PYTHON := $(BIN)/python
endif

source-tree:
	@$(PYTHON_GPU) -m benchmarks.on_gpu.source_tree $(SOURCE_TREE)

test-gpu: $(GPU_NEEDS)
	$(GPU_PYTHON) -c "import sys, torch; sys.exit(None if torch.cuda.is_available() else 'this torch finds no GPU')"
	$(GPU_PYTHON) -m pytest -m gpu tests/moepass/test_gpu.py tests/moepass/test_gpu_kernels.py

benchmark-gpu: $(GPU_NEEDS)
	$(GPU_PYTHON) -m benchmarks.gpu all --output build/gpu

gpu-acceptance: $(GPU_NEEDS)
	$(GPU_PYTHON) -m benchmarks.gpu_acceptance --output build/gpu/acceptance

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy does not know package-dir, so links show it the four folders as the package that is installed.
types: $(INSTALLED)
	@rm -rf $(TYPING) && mkdir -p $(TYPING)/moepass
	@ln -s $(CURDIR)/moepass/* $(TYPING)/moepass/
	@ln -s $(CURDIR)/passes $(CURDIR)/runtime $(CURDIR)/models $(TYPING)/moepass/
	cd $(TYPING) && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache -p moepass

benchmarks: $(INSTALLED)
	$(BIN)/python -m benchmarks.exactness
	$(BIN)/python -m benchmarks.compile_time compare
	$(BIN)/python -m benchmarks.overlap
	$(BIN)/python -m benchmarks.bank_memory
	$(BIN)/python -m benchmarks.compile_time start
	$(BIN)/python -m benchmarks.compile_time serve
	$(BIN)/python -m benchmarks.two_ranks
	$(BIN)/python -m benchmarks.idle_rank
	$(BIN)/python -m benchmarks.load_memory
	$(BIN)/python -m benchmarks.memory.hybrid_prefill
	$(BIN)/python -m benchmarks.disk_home
	$(BIN)/python -m benchmarks.formats
	$(BIN)/python -m benchmarks.format_thresholds
	$(BIN)/python -m benchmarks.hybrid
	$(BIN)/python -m benchmarks.prediction
	$(BIN)/python -m benchmarks.memory_budget
	$(BIN)/python -m benchmarks.serving.company
	$(BIN)/python -m benchmarks.published
	$(BIN)/python -m benchmarks.serving.faults
	$(BIN)/python -m benchmarks.serving.overload
	$(BIN)/python -m benchmarks.serving.busy_core
	$(BIN)/python -m benchmarks.serving.routing
	$(BIN)/python -m benchmarks.serving.throughput compare
	$(BIN)/python -m benchmarks.serving.throughput questions
	$(BIN)/python -m benchmarks.ranks.project_styles

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
