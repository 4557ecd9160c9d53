# One environment for everything: .venv, made from the pins in constraints.txt. Another one stands in a folder of its own:
# make test-fast VENV=.venv-new PYTHON=python3.13 TORCH=2.15.0
PYTHON ?= python3
VENV   ?= .venv
# Pins, and what differs from them: another version of torch, which chooses its setuptools (2.11 takes none from 82 on);
# the index that torch alone comes from.
CONSTRAINTS ?= constraints.txt
TORCH       ?=
TORCH_INDEX ?=
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install -q --disable-pip-version-check
PINS   := $(VENV)/constraints.txt
PYTEST  = $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

TESTS  := test-fast test test-changed test-long test-all test-exhaustive durations
# test-changed: what was changed since the commit up to which all affected long tests were seen to pass; or since SINCE.
SINCE  ?= $(shell cat .ci/long-green)
# With room for them in memory the tests' files are there: most of what tests of crashes wait for is fsync. Room is 8 GB
# of the file system, 12 GB of the machine, and 16 GB of the control group, where there is one with a limit.
FREE   := $(shell awk '/^MemAvailable:/ && $$2 >= 12000000 { print "yes" }' /proc/meminfo 2>/dev/null)
SMALL  := $(shell cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes 2>/dev/null | \
	awk '$$1 != "max" && $$1 < 16000000000 { print "yes" }')
ROOM   := $(shell df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 && $$4 >= 8000000 { print $$6 }')
MEMORY := $(if $(FREE),$(if $(SMALL),,$(ROOM)))
# What failed stays there until the next run, not for three.
PYTEST += $(if $(MEMORY),-o tmp_path_retention_count=1)

$(TESTS): export PYTEST_DEBUG_TEMPROOT = $(MEMORY)
# Every worker, rank and program of the tests computes with one thread: there are more of them than cores.
$(TESTS): export OMP_NUM_THREADS = 1
# Rewriting the asserts of all tests is half of what collecting them takes: kept, where the shell says otherwise too.
$(TESTS): export PYTHONDONTWRITEBYTECODE =

.PHONY: env demo test-fast test test-changed durations test-long test-all test-exhaustive test-gpu fuzz docs lint format \
	clean

env: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(PIP) "pip>=24"
	sed '$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/; /^setuptools==/d)' $(CONSTRAINTS) > $(PINS)
	$(if $(TORCH_INDEX),$(PIP) --no-deps --index-url $(TORCH_INDEX) "$$(grep '^torch==' $(PINS))")
	$(PIP) -c $(PINS) -e ".[all,dev]"
	touch $@

demo: env
	$(BIN)/quern demo

test-fast: env
	$(PYTEST) -m "not slow and not long and not exhaustive"

test: env
	$(PYTEST) -m "not long and not exhaustive"

test-changed: env
	$(PYTEST) -m "not exhaustive" --changed-since "$(SINCE)"

test-long: env
	$(PYTEST) -m "long and not exhaustive"

test-all: env
	$(PYTEST) -m "not exhaustive"

test-exhaustive: env
	$(PYTEST) -m "exhaustive"

# How long each test takes, from which the order of files follows (tests/durations.json).
durations: env
	$(PYTEST) -m "not exhaustive" --record-durations

# Measures on one GPU, in the Python that is there and without an installation; again until it says that nothing remains:
# make test-gpu ARGS="--part train --minutes 9", and make test-gpu ARGS="--device cpu --small" without a GPU
test-gpu:
	$(PYTHON) benchmarks/gpu/suite.py $(ARGS)

# Hostile files, pages and URLs: make fuzz FUZZ_ARGS="--minutes 5 --only reader --seed 7"
fuzz: env
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m support.data_pipeline.fuzz $(FUZZ_ARGS)

docs: env
	$(BIN)/python tests/support/config_page.py
	$(BIN)/python tests/support/rules_page.py

LOOSE = $(addprefix --disable-error-code ,arg-type assignment call-overload misc operator return-value union-attr \
	unused-ignore var-annotated)
lint: env
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy $(LOOSE) benchmarks # whether what they call is there
	$(BIN)/lint-imports

format: env
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) demo-run .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
