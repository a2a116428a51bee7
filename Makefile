# make train    from nothing to a trained model and a sample of its text; STEPS=20 is the short form
# make check    while one works: lint and the unit tests; ROOM=optim takes those of one room
# make test     every capability and every invariant; docs/testing.md has the minutes that these may take
# make test-all what CI runs: a twentieth of test-wide and mutants, another with each commit; WHOLE=1 takes all
# make test-extras  every test of what no step needs: planner, synchronization, translation, doctor, post-training
# make test-wide  more layouts, cells and trials of what `make test` proves; TURN=2/20 takes the second of twenty
# make test-bits  that bits are the same with each width of vector instructions which torch has for this CPU;
#               WIDEST= leaves out the widest, which `make test` has
# make test-slurm  jobs on a SLURM of four nodes, which it starts on this machine and takes down again; needs root.
#               Jobs mostly wait, so CLUSTERS=3 share the tests; ONE_ADDRESS=1 is as where namespaces are refused
# make test-report  the report in a browser (chromium), and records in the services that read them; TURN=1/2 takes half
# make mutants  that each of the planted faults fails a test; TURN=2/20 takes the second of twenty
# make oracles  environments of other Pythons and torches, kept for all clones; NAMES="oldest newest" makes some of them
# make compile-kernels  that every kernel compiles for the GPUs of three generations of NVIDIA's and one of AMD's
# make fuzz     hostile files and lines for all that reads them, SECONDS=60 of it; KIND="yaml flags" takes some kinds
# make fuzz-layouts  steps of megalite, megatron-core, transformers, torchtitan and a plain trainer on drawn networks and
#               layouts, judged by megalite-verify; COUNT=20 of each, PROGRAM="megatron plain" takes some,
#               TITAN=titan/bin/python is an interpreter that has torchtitan
# make flakes   which tests of processes and time fail now and then, and how often; FILES="tests/..." takes some
# make kills    200 kills of ranks at random moments: who is named, how soon all have ended, and that no bit is lost
# make lint     style, types, the direction of imports, the sizes of rooms, and the links of the documentation
# make docs     the documentation as a site, in site/; a link or a page that is missing is an error
# make setup    only the environment, in .venv
#
# PYTHON=python3.12        the interpreter to start from (3.11 or later)
# WORKERS=4                how many processes share the tests, each with ranks of its own; 3 suit two cores: tests wait, too
# TORCH_INDEX=URL          where torch, and only torch, is installed from, e.g. a build for CPUs
# PYTEST_ARGUMENTS=-x      more for pytest

PYTHON ?= python3
TORCH_INDEX ?=
STEPS ?= 300
WORKERS ?= 3
CLUSTERS ?= 3
ROOM ?=
TURN ?=
WHOLE ?=
NAMES ?=
WIDEST ?= 1
FILES ?=
SECONDS ?= 60
KIND ?=
SEED ?=
COUNT ?= 20
PROGRAM ?=
TITAN ?=
REPORT ?=

# Workers, ranks and programs are many processes: without bytecode in files, each of them compiles the same sources again.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.PHONY: setup train check test test-all test-extras test-wide test-bits test-slurm test-report mutants oracles \
	compile-kernels fuzz fuzz-layouts flakes kills lint docs

PIP = .venv/bin/python -m pip install -qq --disable-pip-version-check
# The torch of the whole suite. pyproject.toml has the range, of which `make oracles` tries both ends.
TORCH = torch==2.13.0
COMMIT = $(shell git rev-parse HEAD)
# Commits of main take turns, so that any twenty in a row run all of what takes turns: one of so many shares.
share = $(if $(WHOLE),,TURN=$(shell expr $$(git rev-list --count --first-parent HEAD) % $(1) + 1)/$(1))
SLURM = $(shell test "$$(id -u)" = 0 && command -v slurmctld)
CHROMIUM = $(shell command -v chromium)
PYTEST = .venv/bin/python -m pytest
# Long files come first, so that none is the last: of tests/unit those that are `costly`; the others' folders by name.
SHARED = --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder --durations=20 $(PYTEST_ARGUMENTS)
PYTEST_TURN = $(if $(TURN),--turn=$(TURN))

setup: .venv/installed

.venv/installed: pyproject.toml setup.py
	@echo "Installing megalite into .venv (the first time, torch takes a few minutes to download)"
	@test -x .venv/bin/pip || $(PYTHON) -m venv .venv
	@$(if $(TORCH_INDEX),$(PIP) --index-url '$(TORCH_INDEX)' '$(TORCH)')
	@$(PIP) --constraint tests/constraints.txt '$(TORCH)' --editable .
	@touch $@

.venv/installed-test: .venv/installed tests/constraints.txt
	@$(PIP) --constraint tests/constraints.txt --editable '.[test]'
	@$(PIP) --no-deps megatron-core==0.16.1 # an oracle of the tests; its dependencies are for what they do not use
	@touch $@

.venv/installed-sinks: .venv/installed-test
	@$(PIP) --constraint tests/constraints.txt --editable '.[sinks]'
	@touch $@

train: .venv/installed
	@STEPS=$(STEPS) PATH="$(CURDIR)/.venv/bin:$$PATH" examples/train_small_llama.sh

check: lint
	@files=$$(grep --files-with-matches --extended-regexp '$(if $(ROOM),megalite[._](extras\.)?$(ROOM)\b)' tests/unit/test_*.py; \
		$(if $(ROOM),ls -d tests/extras/$(ROOM) 2>/dev/null)); \
		[ -n "$$files" ] || { echo "ROOM=$(ROOM): no test in tests/unit imports megalite.$(ROOM)" >&2; exit 64; }; \
		$(PYTEST) $(SHARED) -m 'not wide and not slow and not report$(if $(ROOM),, and not costly)' $$files

test: .venv/installed-test
	$(PYTEST) $(SHARED)

test-extras: .venv/installed-test
	$(PYTEST) $(SHARED) -m 'extra and not wide and not slow and not report' tests/extras

test-wide: .venv/installed-test
	$(PYTEST) $(SHARED) $(PYTEST_TURN) -m 'wide and not slow and not report' --ignore=tests/fuzz

test-bits: .venv/installed-test
	WIDEST=$(WIDEST) .venv/bin/python -m tests.bits $(SHARED)

# The number before each stage is its budget in minutes on two cores.
test-all:
	.ci/stages '3 .venv/installed-test' '1 lint' '1 compile-kernels' '6 test' '5.5 test-extras' '4.5 test-wide $(call share,20)' \
		'2.5 test-bits WIDEST=' '3.5 mutants $(call share,20)' '3.5 oracles $(call share,12)' \
		'1.5 fuzz REPORT=1 SEED=$(COMMIT)' '1.5 fuzz-layouts REPORT=1 COUNT=3 SEED=$(COMMIT)' \
		$(if $(SLURM),'3 test-slurm $(call share,12)') $(if $(CHROMIUM),'1.5 test-report $(call share,2)') '0.5 train STEPS=20'
	@$(if $(SLURM),,echo "NOT RUN: test-slurm, which needs root and SLURM's programs (.ci/run installs them)")
	@$(if $(CHROMIUM),,echo "NOT RUN: test-report, which needs chromium (.ci/run installs it)")
	@for program in mpirun.openmpi mpiexec.hydra; do command -v $$program >/dev/null || \
		echo "NOT RUN: ranks under $$program, which is not installed (.ci/run installs it)"; done

test-slurm: .venv/installed-test
	$(PYTEST) -m slurm tests/slurm $(PYTEST_TURN) --numprocesses=$(CLUSTERS) --dist=load --maxschedchunk=1 --durations=20 \
		$(PYTEST_ARGUMENTS)

test-report: .venv/installed-sinks
	$(PYTEST) -m report tests/extras $(PYTEST_TURN) --numprocesses=2 --dist=loadfile --durations=20 $(PYTEST_ARGUMENTS)

oracles: .venv/installed-test
	.venv/bin/python -m tests.environments $(if $(TURN),--turn $(TURN)) $(NAMES)

mutants: .venv/installed-test
	.venv/bin/python -m tests.mutants $(if $(TURN),--turn $(TURN))

compile-kernels: .venv/installed-test
	PYTHONPATH=. .venv/bin/python -m tests.kernels.compile

fuzz: .venv/installed-test
	$(PYTEST) --numprocesses=$(WORKERS) --dist=load -m '' tests/fuzz
	.venv/bin/python -m tests.fuzz --seconds $(SECONDS) $(if $(KIND),--kind $(KIND)) $(if $(SEED),--seed $(SEED)) \
		$(if $(REPORT),--report)

fuzz-layouts: .venv/installed-test
	.venv/bin/python -m tests.layouts --count $(COUNT) $(if $(SEED),--seed $(SEED)) $(if $(PROGRAM),--program $(PROGRAM)) \
		$(if $(TITAN),--python $(TITAN)) $(if $(REPORT),--report)

flakes: .venv/installed-test
	.venv/bin/python -m tests.flakes $(FILES)

kills: .venv/installed-test
	PYTHONPATH=. .venv/bin/python -m tests.kills

docs: .venv/installed-test
	.venv/bin/mkdocs build --strict
	@echo "The documentation is in $(CURDIR)/site/index.html; to read it while writing: .venv/bin/mkdocs serve"

lint: .venv/installed-test
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	.venv/bin/python -m tests.rooms
	.venv/bin/mkdocs build --strict
	@if command -v shellcheck >/dev/null; then \
		shellcheck --external-sources .ci/run .ci/stages benchmarks/*.sh examples/*.sh examples/kubernetes/*.sh slurm/*.sh slurm/*.sbatch; \
		else echo "NOT RUN: shellcheck, which is not installed"; fi
