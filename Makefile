# Each target makes .venv and fills it by itself; a second run installs nothing.
#
#   make env         only make the environment
#   make lab         rehearse the multi-GPU lab here: train, compare layouts, write a report
#   make test        style, then all tests and all notebooks' stored outputs
#   make notebooks   after an edit of a chapter or of syllabus.toml: sync, execute, lint
#   make lint        style of the code and rules of the chapters, without executing anything
#
# PYTHON=python3.12 chooses another Python, CONSTRAINTS=FILE other versions of the packages,
# CHAPTERS="chapters/01_start_here.ipynb" the notebooks that `make notebooks` executes.

PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; \
	done)
CONSTRAINTS ?= assets/constraints.txt
CHAPTERS ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS)
# Once a set is installed, its stamp is newer than the files that name it.
COURSE := $(VENV)/.installed-course
TESTS := $(VENV)/.installed-tests

# loadscope keeps a notebook's cells (and a test file's shared processes) in one worker.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadscope \
	--nbval --nbval-current-env --nbval-cell-timeout 120 \
	--nbval-sanitize-with assets/nbval_sanitize.cfg

.PHONY: env lab test notebooks lint

env: $(COURSE)

lab: $(COURSE)
	$(BIN)/python -m course_lib.lab

test: $(TESTS)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(PYTEST) tests chapters

notebooks: $(TESTS)
	$(BIN)/python -m course_lib.classroom.notebooks sync
	$(BIN)/python -m course_lib.classroom.notebooks run $(CHAPTERS)
	$(BIN)/python -m course_lib.classroom.notebooks lint $(CHAPTERS)

lint: $(TESTS)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python -m course_lib.classroom.notebooks sync --check
	$(BIN)/python -m course_lib.classroom.notebooks lint $(CHAPTERS)

$(BIN)/python:
	@test -n "$(PYTHON)" && $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo 'This course needs Python 3.11 or newer. Install one, then: make PYTHON=python3.12 ...'; \
		exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
		echo '$(PYTHON) cannot make virtual environments. On Debian: apt install python3-venv'; \
		exit 1; }
	$(PYTHON) -m venv $(VENV)

$(COURSE): requirements.txt $(CONSTRAINTS) | $(BIN)/python
	@echo "Installing the course's packages into $(VENV) (some minutes, once)"
	$(INSTALL) -r requirements.txt
	@touch $@

$(TESTS): assets/requirements-test.txt assets/requirements-peers.txt $(COURSE) | $(BIN)/python
	@echo "Installing what the tests need into $(VENV)"
	$(INSTALL) -r assets/requirements-test.txt -r assets/requirements-peers.txt
	@touch $@
