# Needs Python 3.11 or later with pip and venv, and make. Everything else goes into .venv.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.PHONY: help demo test lint format bench flax-suite campaign mutations soak clean

help:
	@echo "make demo        train a real model three ways and compare"
	@echo "make test        run the tests (PYTEST_ARGS='-k policy' to choose)"
	@echo "make lint        ruff and pyright"
	@echo "make format      let ruff repair what it can"
	@echo "make bench       measure cost against float32 and hand-written half"
	@echo "make flax-suite  run Flax's own Linen tests under a policy"
	@echo "make campaign    inject 20,000 faults into training, and count those that left a trace"
	@echo "make mutations   break our own code in 40 ways: does the test of each notice?"
	@echo "make soak        train for a million steps with faults, in both half types"
	@echo "make clean       remove .venv and caches"

# Newer than pyproject.toml, or installed again: dependencies cannot go stale unnoticed.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "mpjax needs Python 3.11 or later; '$(PYTHON)' says: $$($(PYTHON) --version 2>&1)." >&2; \
	  echo "Name one that is: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: $(STAMP)
	$(RUN) examples/demo.py

# Two workers, since two cores are what the time limit is for. A GPU is left alone unless
# JAX_PLATFORMS asks for it.
test: export JAX_PLATFORMS ?= cpu
test: $(STAMP)
	$(RUN) -m pytest -n 2 --dist worksteal $(PYTEST_ARGS)

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(RUN)

format: $(STAMP)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: $(STAMP)
	$(RUN) benchmarks/run.py

flax-suite: $(STAMP)
	$(RUN) tests/flax_suite/run.py

mutations: export JAX_PLATFORMS ?= cpu
mutations: $(STAMP)
	$(RUN) -m tests.mutations.run

campaign: export JAX_PLATFORMS ?= cpu
campaign: $(STAMP)
	$(RUN) -m tests.campaign.run

soak: export JAX_PLATFORMS ?= cpu
soak: $(STAMP)
	$(RUN) -m tests.soak

clean:
	rm -rf $(VENV) build dist .cache .hypothesis .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
