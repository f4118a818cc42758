# `make quickstart` and `make test` need nothing but Python 3.11 or newer.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: install quickstart test test-fast gpu-test gpu-bench lint clean

install: $(VENV)/.installed

quickstart: $(VENV)/.installed
	$(BIN)/diffmegatron quickstart

test: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=10

# What is decided without training a step: layering, recipes, plans, checkpoints, order of samples.
FAST := $(addprefix tests/unit/, attempts attention/context_parallel attention/kernels checkpoint config \
	data/index data/sampling optim/test_guard.py optim/test_schedule.py parallel/test_launcher.py \
	plan test_architecture.py test_files.py test_links.py test_words.py)

test-fast: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(FAST)

gpu-test: $(VENV)/.installed
	$(BIN)/python -m pytest tests/gpu

gpu-bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks tune_attention --listed benchmarks/results/tune_sm_90_d128.json
	$(BIN)/python -m benchmarks attention
	$(BIN)/python -m benchmarks chunks
	$(BIN)/python -m benchmarks layer training.attention_backend=triton training.micro_batch_size=4

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf runs build *.egg-info

# torch comes first and pinned: asked for as a dependency, the registry's newest build with
# gigabytes of CUDA packages would be taken even where a CPU wheel of this version is at hand.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "diffmegatron needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	@echo 'installing into $(VENV), which takes minutes'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@
