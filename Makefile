# `make` alone lists the targets.
SHELL := bash
.DEFAULT_GOAL := help

# Two ranks, or as many as there are GPUs if that is one.
WORLD_SIZE ?= $(if $(filter 1,$(if $(filter cuda,$(DEVICE)),$(shell (nvidia-smi --list-gpus || ls /dev/nvidia[0-9]*) 2>/dev/null | grep -c -e ^GPU -e ^/dev))),1,2)
CONFIG ?= configs/countdown_sft.yaml
PYTEST_ARGS ?=
# Test files that run at a time, on one thread each: starting an engine takes longest, and one core.
WORKERS ?= $(if $(filter cuda,$(DEVICE)),1,2)
ARGS ?=

BENCHMARKS := hot_swap sampling broadcast startup

PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Older versions of make do not pass variables to the shell here.
DEVICE := $(shell VECTORLM_DEVICE='$(VECTORLM_DEVICE)' bash .ci/setup --device)
OTHER_DEVICE := $(filter-out $(DEVICE),$(shell cat $(STAMP) 2>/dev/null))

# Passed on when given on the command line: make run PYTHON=python3.12 VECTORLM_DEVICE=cpu
export PYTHON VECTORLM_DEVICE

# Its packages are no part of the pinned stack.
DOCS := build/docs-env

# Folders whose tests mostly compute in their own process; --fast skips the others among them.
FAST := tests/algorithms tests/data tests/ranks tests/report tests/runs/config tests/sampling/weights

# Packages that nothing else of the tests may see: they slow imports down, or replace pinned ones.
EXTRAS := $(CURDIR)/build/extras
WITH_EXTRAS := tests/train/test_optimizers.py tests/train/test_nf4.py tests/rl/environments/test_verifiers.py tests/sampling/test_verify.py \
	tests/report/test_trackers.py

# Make exports variables of its command line, and WORLD_SIZE marks a process that torchrun has started.
unexport WORLD_SIZE

# Tests start hundreds of processes; without cached bytecode, each of them would compile the package.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install run real countdown papers test test-all test-extras test-fast test-long gpu lint docs bench slides clean FORCE

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

install: $(STAMP) ## create .venv with the pinned stack, for CPU or CUDA by what the machine has

# The script writes the stamp as its last act, so an interrupted installation is begun again.
$(STAMP): .ci/setup setup.py requirements/cpu.txt requirements/cuda.txt requirements/rewards.txt $(if $(OTHER_DEVICE),FORCE)
	bash .ci/setup

run: $(STAMP) ## fine-tune a tiny Llama on Countdown with vLLM beside it (WORLD_SIZE=2 CONFIG=... ARGS=...)
	$(BIN)/python examples/make_countdown.py --output_dir data/countdown --seed 0
	$(BIN)/python examples/llama_example_mp.py --yaml_path $(CONFIG) --world_size $(WORLD_SIZE) $(ARGS)

real: $(STAMP) ## GRPO on SmolLM2-135M-Instruct, a real instruct model: ten minutes on two cores
	$(BIN)/vectorlm model HuggingFaceTB/SmolLM2-135M-Instruct data/smollm2
	$(BIN)/python examples/small_sums.py --output_dir data/small_sums
	$(BIN)/vectorlm run configs/smollm2_grpo.yaml $(ARGS)

countdown: $(STAMP) ## reinforcement learning on Countdown: four algorithms, three seeds each, a table and a picture
	$(BIN)/python benchmarks/countdown.py

papers: $(STAMP) ## three results of papers, end to end on two cores: takes hours
	$(BIN)/python benchmarks/papers.py --train

test: $(STAMP) ## run the tests, without those marked slow or long (PYTEST_ARGS=...)
	$(PYTEST) -m "not slow and not long" $(PYTEST_ARGS)

test-fast: $(STAMP) ## run the tests that start no engine, ranks or other process
	$(PYTEST) -n 0 --fast -m "not slow and not long" $(FAST) $(PYTEST_ARGS)

test-all: $(STAMP) ## run the slow tests too
	$(PYTEST) -m "not long" $(PYTEST_ARGS)

test-extras: $(EXTRAS)/.installed ## run the tests of optional packages, which lie beside the pinned stack
	PYTHONPATH=$(EXTRAS) $(PYTEST) -m "not long" $(WITH_EXTRAS) $(PYTEST_ARGS)

$(EXTRAS)/.installed: requirements/one_card.txt requirements/verifiers.txt requirements/bench.txt requirements/trackers.txt | $(STAMP)
	rm -rf $(EXTRAS)
	$(BIN)/python -m pip install --quiet --no-deps --target $(EXTRAS) $(addprefix -r ,$^)
	touch $@

test-long: $(STAMP) ## run the tests that test-all leaves out
	$(PYTEST) -m long $(PYTEST_ARGS)

gpu: $(STAMP) ## qualify a GPU machine, in 44 minutes on one GPU (ARGS="--only first", ARGS=--plan)
	$(BIN)/python benchmarks/gpu/qualify.py $(ARGS)

LOOSE = arg-type assignment func-returns-value index list-item misc union-attr var-annotated
lint: $(STAMP) ## check style and types
	$(BIN)/ruff check .
	$(BIN)/mypy
	# Benchmarks run rarely: find the names and arguments that the library has no more.
	MYPYPATH=benchmarks $(BIN)/mypy --explicit-package-bases $(LOOSE:%=--disable-error-code=%) benchmarks

docs: $(DOCS)/.installed ## build the documentation site into build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict
	@echo "open build/site/index.html, or: $(BIN)/python -m http.server --directory build/site"

$(DOCS)/.installed: requirements/docs.txt | $(STAMP)
	$(BIN)/python -m venv --clear $(DOCS)
	$(DOCS)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r requirements/docs.txt
	touch $@

bench: $(STAMP) ## measure swaps, sampling, broadcasting and starting
	@set -e; for name in $(BENCHMARKS); do echo "== $$name"; $(BIN)/python benchmarks/$$name.py; done

slides: $(STAMP) ## draw the charts of the talk from measured results, and build slides/vectorlm.pdf
	$(BIN)/pip install -q --no-deps typst==0.15.2
	$(BIN)/python slides/build.py

clean: ## delete caches and build output (.venv, data/ and runs/ stay)
	rm -rf build *.egg-info .hypothesis .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
