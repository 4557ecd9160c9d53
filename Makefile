# One environment for everything: .venv, made from the pins in constraints.txt.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

TESTS  := test-fast test test-long test-all test-exhaustive
# With room for them in memory the tests' files are there: most of what tests of crashes wait for is fsync.
MEMORY := $(shell df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 && $$4 >= 8000000 { print $$6 }')

$(TESTS): export PYTEST_DEBUG_TEMPROOT = $(MEMORY)
# Every worker, rank and program of the tests computes with one thread: there are more of them than cores.
$(TESTS): export OMP_NUM_THREADS = 1
# Rewriting the asserts of all tests is half of what collecting them takes: kept, where the shell says otherwise too.
$(TESTS): export PYTHONDONTWRITEBYTECODE =

.PHONY: env demo test-fast test test-long test-all test-exhaustive lint format clean

env: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check "pip>=24"
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[all,dev]"
	touch $@

demo: env
	$(BIN)/quern demo

test-fast: env
	$(PYTEST) -m "not slow and not long and not exhaustive"

test: env
	$(PYTEST) -m "not long and not exhaustive"

test-long: env
	$(PYTEST) -m "long"

test-all: env
	$(PYTEST) -m "not exhaustive"

test-exhaustive: env
	$(PYTEST) -m "exhaustive"

lint: env
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: env
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) demo-run .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
