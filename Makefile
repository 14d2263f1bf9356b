# Python 3.12 or 3.13; empty: the first of them that requirements/create-venv.sh finds.
PYTHON ?=
VENV ?= .venv
# Additional pip arguments for torch only, such as the --index-url of CPU builds.
TORCH_INSTALL_ARGS ?=
# Folder with GSM8K as published; adds its sequence lengths and recipes to the benchmarks.
GSM8K ?=
# Additional pytest arguments, such as ARGS="-k loss -x".
ARGS ?=
# Number of processes that `make test` runs tests in; each of them may start a dozen more, which wait much of the time.
TEST_PROCESSES ?= 3

# File that `make test-times` writes: CPU seconds, wall seconds and name of each test, the dearest first.
TIMES ?= runs/test-times.tsv

# One BLAS thread per process: there are many workers and few cores.
export OMP_NUM_THREADS ?= 1
# Hundreds of test processes import the same modules: their bytecode is cached.
unexport PYTHONDONTWRITEBYTECODE

# Compute capabilities that `make setup-gpu` builds for, such as "9.0;10.0"; empty: those of this machine's GPUs.
TORCH_CUDA_ARCH_LIST ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input -qq
PACKAGES_GPU := $(VENV)/.packages-gpu
INSTALLED_GPU := $(VENV)/.installed-gpu
# A GPU environment, even an incomplete one, satisfies `setup`: it is never turned back into a CPU environment.
INSTALLED := $(if $(wildcard $(VENV)/.gpu),$(INSTALLED_GPU),$(VENV)/.installed)
# A CPU environment gets Triton for its interpreter, in a folder that only tests of kernels read.
INTERPRETER := $(if $(wildcard $(VENV)/.gpu),,$(VENV)/.installed-triton)
# Published chat templates, in a folder that only tests of the gateway read.
TEMPLATES := $(VENV)/.installed-templates

# Environments of an earlier version of Python are replaced with all that is in them.
CREATE_VENV := requirements/create-venv.sh

TEST_PACKAGES := slurm-wlm munge shellcheck iproute2 bubblewrap

.DEFAULT_GOAL := help
.PHONY: setup setup-gpu packages-gpu setup-test-tools demo test test-times mutants coverage test-slow test-gpu lint format format-check types imports measures docs check bench clean help

setup: $(INSTALLED) ## Create .venv with pinned packages; does nothing if it is up to date

# The bytecode of the packages, 23,000 files, is compiled on all cores; pip would do it on one. A package's templates and
# tests for other versions of Python do not compile, which pip ignores too.
$(VENV)/.installed: $(CREATE_VENV) requirements/torch.txt requirements/cpu.txt requirements/dev.txt pyproject.toml
	@created=$$($(CREATE_VENV) $(VENV) $(PYTHON)) && echo "[1/5] $$created"
	@echo "[2/5] torch"
	@$(PIP) install --no-compile --no-deps $(TORCH_INSTALL_ARGS) -r requirements/torch.txt
	@$(BIN)/python -c 'import importlib.metadata as m, sys; sys.exit("+cpu" not in m.version("torch"))' || { \
		echo "      which is a build for CUDA: its libraries, 2.5 GB; TORCH_INSTALL_ARGS can name an index of CPU builds"; \
		$(PIP) install --no-compile --no-deps -r requirements/torch-cuda.txt; }
	@echo "[3/5] $$(cat requirements/cpu.txt requirements/dev.txt | grep -c ==) pinned packages"
	@$(PIP) install --no-compile --no-deps -r requirements/cpu.txt -r requirements/dev.txt
	@echo "[4/5] megarl"
	@$(PIP) install --no-deps --no-build-isolation -e .
	@echo "[5/5] bytecode"
	@PYTHONWARNINGS=ignore $(BIN)/python -m compileall -qq -j 0 $(abspath $(VENV))/lib || true
	@touch $@

$(VENV)/.installed-triton: $(CREATE_VENV) requirements/triton.txt | $(INSTALLED)
	@echo "$$(grep == requirements/triton.txt), in $(VENV)/triton, for tests of kernels"
	@$(PIP) install --no-deps --upgrade --target $(VENV)/triton -r requirements/triton.txt
	@touch $@

$(TEMPLATES): $(CREATE_VENV) requirements/templates.txt | $(INSTALLED)
	@echo "$$(grep == requirements/templates.txt), in $(VENV)/templates, for its chat templates"
	@$(PIP) install --no-deps --upgrade --target $(VENV)/templates -r requirements/templates.txt
	@touch $@

setup-gpu: $(INSTALLED_GPU) ## Create .venv for GPUs, with CUDA, Transformer Engine and apex

# Everything except megarl itself, for images that are built in layers.
packages-gpu: $(PACKAGES_GPU)

$(INSTALLED_GPU): $(PACKAGES_GPU) pyproject.toml
	@echo "[5/5] megarl"
	@$(PIP) install --no-deps --no-build-isolation -e .
	@! $(BIN)/python -m pip --disable-pip-version-check check | grep -vE "$(PERMITTED_CHECK_OUTPUT)"
	@touch $@

# Permitted output of `pip check`: the wheel of Transformer Engine for all Python 3 versions is tagged 3.10 internally.
PERMITTED_CHECK_OUTPUT := ^No broken requirements|^transformer.engine.cu13 .* is not supported on this platform

# The wheels of the compiler have versioned library names only, in a folder lib: two links turn it into a CUDA_HOME.
$(PACKAGES_GPU): $(CREATE_VENV) requirements/gpu.txt requirements/gpu-build.txt requirements/dev.txt
	@TORCH_CUDA_ARCH_LIST="$(TORCH_CUDA_ARCH_LIST)" requirements/gpu-machine.sh
	@created=$$($(CREATE_VENV) $(VENV) $(PYTHON)) && echo "[1/5] $$created"
	@touch $(VENV)/.gpu
	@echo "[2/5] $$(cat requirements/gpu.txt requirements/dev.txt | grep -c ==) pinned packages, including CUDA"
	@$(PIP) install --no-deps -r requirements/gpu.txt -r requirements/dev.txt
	@echo "[3/5] CUDA_HOME: $(VENV)/cuda"
	@ln -sfn $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia/cu13 $(VENV)/cuda
	@ln -sfn lib $(VENV)/cuda/lib64
	@ln -sfn libcudart.so.13 $(VENV)/cuda/lib/libcudart.so
	@echo "[4/5] compiling Transformer Engine and apex; this takes minutes"
	@PATH="$(abspath $(BIN)):$$PATH" CUDA_HOME="$(abspath $(VENV))/cuda" \
		CPATH="$(abspath $(VENV))/cuda/../cudnn/include:$(abspath $(VENV))/cuda/../nccl/include" \
		NVTE_PYTORCH_FORCE_BUILD=TRUE APEX_CPP_EXT=1 APEX_CUDA_EXT=1 \
		$(if $(TORCH_CUDA_ARCH_LIST),TORCH_CUDA_ARCH_LIST="$(TORCH_CUDA_ARCH_LIST)") \
		$(PIP) install --no-deps --no-build-isolation -r requirements/gpu-build.txt
	@touch $@

setup-test-tools: ## Install the tools for the tests of launch/ and sandbox/, as root: Slurm, munge, shellcheck, ip, bubblewrap
	@dpkg -s $(TEST_PACKAGES) >/dev/null 2>&1 || { \
		[ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null || { echo "make setup-test-tools needs root and apt-get; it installs $(TEST_PACKAGES)" >&2; exit 1; }; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends $(TEST_PACKAGES) >/dev/null; }

demo: setup ## Train a tiny model with SFT and RL on this machine's CPU
	$(BIN)/megarl demo

PYTEST_PARALLEL := pytest -n $(TEST_PROCESSES) --no-loadscope-reorder --durations 25

test: setup $(INTERPRETER) $(TEMPLATES) ## Run the tests
	$(BIN)/$(PYTEST_PARALLEL) $(ARGS)

coverage: setup $(INTERPRETER) $(TEMPLATES) ## Run the tests and report the line and branch coverage of all their processes; takes twice as long
	$(BIN)/coverage erase
	$(BIN)/coverage run -m $(PYTEST_PARALLEL) $(ARGS)
	$(BIN)/coverage combine -q
	$(BIN)/coverage report

test-times: setup $(INTERPRETER) $(TEMPLATES) ## Run the tests and write the CPU and wall seconds of each to TIMES
	$(BIN)/python -m $(PYTEST_PARALLEL) -p tests.maintenance.durations --durations-to=$(TIMES) $(ARGS)

mutants: setup $(INTERPRETER) ## Seed thirty faults one by one, and check that tests fail for each of them
	$(BIN)/python -m tests.maintenance.mutants $(ARGS)

test-slow: setup ## Run the tests that take minutes
	$(BIN)/pytest -m slow $(ARGS)

# With VENV empty: in the environment of PYTHON as it is. Tests of kernels need PyTorch, Triton, pytest and hypothesis;
# others are skipped without the packages of requirements/test-gpu.txt.
test-gpu: $(if $(VENV),setup) ## Run the tests that need CUDA devices; VENV= uses PYTHON and installs nothing
	PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" \
		$(if $(VENV),$(BIN)/python,$(or $(PYTHON),python3)) -m pytest -m "gpu or multigpu" --continue-on-collection-errors $(ARGS)

lint: setup ## Lint the code
	$(BIN)/ruff check .

format: setup ## Format the code
	$(BIN)/ruff check --fix-only -q .
	$(BIN)/ruff format .

format-check: setup
	$(BIN)/ruff format --check .

types: setup ## Check types with mypy
	$(BIN)/mypy

imports: setup ## Check the import layers
	$(BIN)/lint-imports

measures: setup ## Measure the source tree: sizes of packages and functions, names, docstrings, excepts, words
	$(BIN)/python -m tests.maintenance.tree_measures

INSTALLED_DOCS := $(VENV)/.installed-docs

$(INSTALLED_DOCS): $(INSTALLED) requirements/docs.txt
	@echo "$$(grep -c == requirements/docs.txt) pinned packages for the documentation"
	@$(PIP) install --no-deps -r requirements/docs.txt
	@touch $@

docs: $(INSTALLED_DOCS) ## Build the documentation site into site/; fails on broken links, anchors and commands
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "built site/index.html"

# Checks that `make check` leaves out, such as SKIP_CHECKS=test.
SKIP_CHECKS ?=
CHECKS := $(filter-out $(SKIP_CHECKS),format-check lint types imports measures docs test)

check: setup ## Run all checks of CI, and print how long each of them took
	@times=""; for name in $(CHECKS); do \
		start=$$(date +%s); $(MAKE) --no-print-directory $$name || exit 1; \
		times="$$times$$(printf '  %-12s %5d s' $$name $$(($$(date +%s) - start)))\n"; \
	done; printf "passed:\n$$times"

bench: setup ## Run the benchmarks that need no GPU and no network; writes benchmarks/results
	$(BIN)/python -m benchmarks.reshard.sweep benchmarks/results/reshard.md
	$(BIN)/python -m benchmarks.packing $(if $(GSM8K),--gsm8k $(GSM8K)) --write benchmarks/results/packing.md
	$(BIN)/python -m benchmarks.gae --write benchmarks/results/gae.md
	$(BIN)/python -m benchmarks.kernels --write benchmarks/results/kernels.md
	$(BIN)/python -m benchmarks.kernels.head_traffic --write benchmarks/results/head-traffic.md
	$(BIN)/python -m benchmarks.checkpoint --write benchmarks/results/checkpoint.md
	$(BIN)/python -m benchmarks.schedule --simulate --write benchmarks/results/schedule.md
	$(BIN)/python -m benchmarks.staleness --toy --write benchmarks/results/staleness.md
	$(BIN)/python -m benchmarks.mismatch --folder runs/mismatch $(if $(GSM8K),--gsm8k $(GSM8K)) --write benchmarks/results/bf16-mismatch.md
	$(BIN)/python -m benchmarks.controller --write benchmarks/results/controller.md
	$(BIN)/python -m benchmarks.sandbox --write benchmarks/results/sandbox.md
	$(BIN)/python -m benchmarks.data --write benchmarks/results/data.md

clean: ## Remove .venv, caches and build outputs; keeps runs/
	rm -rf $(VENV) build dist site *.egg-info .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

help: ## Show this list
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/\1\t\2/p' $(MAKEFILE_LIST) | while IFS="$$(printf '\t')" read -r name text; do printf '  %-16s %s\n' "$$name" "$$text"; done
