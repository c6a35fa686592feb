# `make help` lists the targets. PYTHON picks the interpreter (>= 3.11), PIP_ARGS goes to pip (another index, a cache), ARGS to the program.
SHELL := /bin/bash
PYTHON ?= python3
PIP_ARGS ?=
ARGS ?=
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help train test test-all lint format types bench parity clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'
	@echo "  Variables: PYTHON=$(PYTHON) PIP_ARGS='$(PIP_ARGS)' ARGS='$(ARGS)' WORKERS=$(WORKERS)"

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, $(PYTHON) is " + sys.version.split()[0] + "; pass PYTHON=python3.12, for example")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) --constraint constraints.txt --editable '.[dev]'
	@touch $(READY)

train: $(READY) ## train the nano model on the standard library's sources (ARGS='teacher=compressed_only seed=2')
	$(BIN)/python train.py $(ARGS)

test: $(READY) ## the tests that need no GPU, on two cores in under ten minutes
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m 'not gpu and not slow' $(ARGS)

test-all: $(READY) ## every test that this machine can run, the slow ones too
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest $(ARGS)

lint: $(READY) ## ruff: lint and format check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY) ## ruff: fix and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(READY) ## mypy on kernels and csa_model
	$(BIN)/mypy

bench: $(READY) ## memory and time of the unfused indexer loss against plain autograd
	$(BIN)/python -m benchmarks.unfused_memory $(ARGS)

parity: $(READY) ## docs/parity.md: logits and gradients against transformers
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m tests.hf.parity --out docs/parity.md

clean: ## remove caches and build products; runs, data_cache and .venv stay
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
