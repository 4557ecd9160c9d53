# One environment for everything: .venv, made from the pins in constraints.txt.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

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
