# make train    from nothing to a trained model and a sample of its text; STEPS=20 is the short form
# make test     everything the tests prove
# make test-slurm  jobs on a SLURM of four nodes, which it starts on this machine and takes down again; needs root.
#               Jobs mostly wait, so CLUSTERS=3 share the tests; ONE_ADDRESS=1 is as where namespaces are refused
# make mutants  that each of the planted faults fails a test
# make compile-kernels  that every kernel compiles for the GPUs of three generations of NVIDIA's and one of AMD's
# make lint     style, types and the direction of imports
# make setup    only the environment, in .venv
#
# PYTHON=python3.12        the interpreter to start from (3.11 or later)
# WORKERS=4                how many processes share the tests, each with ranks of its own
# TORCH_INDEX=URL          where torch, and only torch, is installed from, e.g. a build for CPUs

PYTHON ?= python3
TORCH_INDEX ?=
STEPS ?= 300
WORKERS ?= 2
CLUSTERS ?= 3

.DELETE_ON_ERROR:
.PHONY: setup train test test-slurm mutants compile-kernels lint

PIP = .venv/bin/python -m pip install -qq --disable-pip-version-check
TORCH = $(shell grep -o 'torch>=[^"]*' pyproject.toml)

setup: .venv/installed

.venv/installed: pyproject.toml setup.py
	@echo "Installing megalite into .venv (the first time, torch takes a few minutes to download)"
	@test -x .venv/bin/pip || $(PYTHON) -m venv .venv
	@$(if $(TORCH_INDEX),$(PIP) --index-url '$(TORCH_INDEX)' '$(TORCH)')
	@$(PIP) --editable .
	@touch $@

.venv/installed-test: .venv/installed
	@$(PIP) --editable '.[test]'
	@$(PIP) --no-deps megatron-core==0.16.1 # an oracle of the tests; its dependencies are for what they do not use
	@touch $@

train: .venv/installed
	@STEPS=$(STEPS) PATH="$(CURDIR)/.venv/bin:$$PATH" examples/train_small_llama.sh

test: .venv/installed-test
	.venv/bin/python -m pytest --numprocesses=$(WORKERS) --dist=loadfile --durations=20 $(PYTEST_ARGUMENTS)

test-slurm: .venv/installed-test
	.venv/bin/python -m pytest -m slurm tests/slurm --numprocesses=$(CLUSTERS) --dist=load --maxschedchunk=1 \
		--durations=20 $(PYTEST_ARGUMENTS)

mutants: .venv/installed-test
	.venv/bin/python -m tests.mutants

compile-kernels: .venv/installed-test
	PYTHONPATH=. .venv/bin/python -m tests.kernels.compile

lint: .venv/installed-test
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports
