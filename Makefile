# prefed. `make demo` and `make test` work from a fresh clone: both install into .venv first.
#
#   make install   a virtual environment in .venv with all that demo and test need
#   make demo      align a federation of conflicting tastes in front of you, without a network
#   make test      ruff, mypy and the test suite
#
#   make test-all  the suite with every case: what `make test` samples or leaves out, too (nightly, before a release)
#   make lint      ruff and mypy alone          make docs    the documentation, into site/
#   make format    let ruff rewrite the code
#   make dist      wheel and sdist into dist/   make lock    lock.txt, after a change of constraints.txt
#   make test-processors  the tests of numbers as other processors would compute them
#   make matrix    tests of other libraries on Python 3.11 to 3.14, with their oldest and newest versions
#   make wheelhouse WHEELHOUSE=FOLDER EXTRA=site    what an installation without a network needs
#   make clean     remove what was built
#
# Settings, e.g. `make install PYTHON=python3.12 TORCH=torch`:
#   PYTHON       the interpreter to build .venv with; the first of python3, python3.14 … 3.11 that is new enough
#   TORCH        what to install as PyTorch, before anything that depends on it
#   CONSTRAINTS  versions this release was tested with; empty takes the newest

PYTHON      ?=
TORCH       ?= torch==2.13.0
CONSTRAINTS ?= constraints.txt
JOBS        ?= 2
WHEELHOUSE  ?= wheelhouse
EXTRA       ?= site

VENV := .venv
BIN  := $(VENV)/bin
PIP   = $(BIN)/python -m pip --disable-pip-version-check
WITH  = $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS))

.PHONY: help install demo test test-all suite lint format docs dist lock matrix test-processors wheelhouse clean
.DEFAULT_GOAL := help

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

install: $(VENV)/.installed

# A stamp: a second call does nothing, and a changed pyproject.toml or constraints.txt installs again.
$(VENV)/.installed: pyproject.toml constraints.txt
	@PYTHON="$(PYTHON)" sh scripts/venv.sh $(VENV)
	@echo "prefed: installing into $(VENV); the first time takes some minutes"
	$(PIP) install --quiet "$(TORCH)"
	$(PIP) install --quiet $(WITH) --editable ".[test,dev]"
	@touch $@

$(VENV)/.documented: $(VENV)/.installed
	$(PIP) install --quiet $(WITH) --editable ".[docs]"
	@touch $@

$(VENV)/.released: $(VENV)/.installed
	$(PIP) install --quiet $(WITH) --editable ".[release]"
	@touch $@

# One thread a process here and below: threads that wait for each other on busy cores cost many times what they save.
demo: install
	OMP_NUM_THREADS=1 $(BIN)/prefed demo

# mypy has one process, so the suite does not wait for it.
# What experiments/tests holds changes rarely.
test-all: CASES = --all tests src experiments/tests
test test-all: install
	@$(MAKE) --no-print-directory --jobs 2 CASES="$(CASES)" lint suite

# Some hundred modules are compiled once, and not by each of the processes that tests start.
suite: install
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(CASES) --numprocesses $(JOBS) --dist worksteal

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.documented
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: $(VENV)/.released
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/dist.sh

lock: $(VENV)/.released
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/lock.sh

matrix: $(VENV)/.released
	PATH="$(CURDIR)/$(BIN):$$PATH" TORCH="$(TORCH)" scripts/matrix.sh

test-processors: install
	PYTHON=$(BIN)/python JOBS=$(JOBS) scripts/processors.sh

wheelhouse: $(VENV)/.released $(VENV)/.documented
	PATH="$(CURDIR)/$(BIN):$$PATH" PYTHON="$(or $(PYTHON),$(CURDIR)/$(BIN)/python)" TORCH="$(TORCH)" scripts/wheelhouse.sh $(WHEELHOUSE) $(EXTRA)

clean:
	rm -rf site dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
