# Needs Python 3.11 or later with pip and venv, and make. Everything else goes into .venv.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed
JAXAMP := .venv-jaxamp
COMPILERS := .venv-compilers
BENCH_GPU := .venv-bench-gpu
BENCH_TORCH := .venv-bench-torch
# What JAX is built for; cuda13 needs a driver of 580 or later.
CUDA ?= cuda12
# JAX 0.10 is the last for Python 3.11; later versions of Python get the newest.
OLDEST ?= 3.11
NEWEST ?= 3.13 3.12

.PHONY: help demo test check lint format docs compat flags mutations campaign release bench gpu-hlo tpu-hlo trainers figures clean

help:
	@echo "make demo        train a real model three ways and compare"
	@echo "make test        run the tests (PYTEST_ARGS='-k policy' to choose)"
	@echo "make check       run the slow tests, examples, pages, figures, benchmark scripts, the wheel, and properties on more examples"
	@echo "make lint        ruff, pyright, the layout, complexity, the public API and links"
	@echo "make format      let ruff repair what it can"
	@echo "make docs        build the documentation site into build/site, strictly"
	@echo "make compat      run the tests on the oldest Python and JAX, then on the newest"
	@echo "make flags       run a sample of the tests with each flag of coming versions of JAX and Flax"
	@echo "make mutations   break our own code, by hand and at random: do the tests notice? (ARGS=--help)"
	@echo "make campaign    inject 20,000 faults into training, then train for a million steps with faults"
	@echo "make release     what takes long or asks the network: the wheel in clean environments, long trainings, other projects' tests, links"
	@echo "make bench       measure cost against float32 and dtypes by hand (SCRIPT=parity, accuracy or autocast: another script of benchmarks/)"
	@echo "make gpu-hlo     what an H200 would run, compiled without one: kernels, bytes and temporaries, by hand and under a policy"
	@echo "make tpu-hlo     what a TPU would run, compiled without one: bytes, temporaries, what travels between chips"
	@echo "make trainers    run real trainers for a few steps, in float32, their own bfloat16 and under policies (ARGS=--help)"
	@echo "make figures     draw the figures of the pages again (ARGS=--measure: from new measurements)"
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
# JAX_PLATFORMS asks for it. pyproject.toml keeps tests/check and tests/lint out of the first.
PYTEST = $(RUN) -m pytest -n 2 --dist worksteal
test: export JAX_PLATFORMS ?= cpu
test: $(STAMP)
	$(PYTEST) $(PYTEST_ARGS)

check: export JAX_PLATFORMS ?= cpu
check: $(STAMP)
	$(PYTEST) -m "slow or hypothesis or accuracy" --hypothesis-profile=full $(PYTEST_ARGS)
	$(PYTEST) tests/check $(PYTEST_ARGS)

# Each has a venv of its own, the oldest Python with the lowest versions that pyproject.toml allows. A
# Python that is missing is an error before any test is run.
compat:
	@oldest=$$(.ci/find-python $(OLDEST)) && newest=$$(.ci/find-python $(NEWEST)) || exit 1; \
	mkdir -p build && $$oldest .ci/lowest > build/lowest.txt && : > build/newest.txt || exit 1; \
	for each in "$$newest .venv-newest newest" "$$oldest .venv-oldest lowest"; do \
	  set -- $$each; python=$$1; venv=$$2; \
	  PIP_CONSTRAINT=$(CURDIR)/build/$$3.txt \
	    $(MAKE) --no-print-directory $$venv/.installed PYTHON=$$python VENV=$$venv || exit 1; \
	  $$venv/bin/python .ci/versions.py; \
	  $(MAKE) --no-print-directory test PYTHON=$$python VENV=$$venv || exit 1; \
	done

# JAX and Flax turn such flags on by default, one release after the other. A sample of the tests runs
# with each, and with all but the last two, which JAX and Flax themselves do not support everywhere.
FLAGS := JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS JAX_CUSTOM_JVP3 JAX_CUSTOM_VJP3 JAX_REMAT3 \
  JAX_ENABLE_CHECKS JAX_MUTABLE_ARRAY_CHECKS
NOT_WITH_OTHERS := JAX_SCAN3 FLAX_HIJAX_VARIABLE
FLAG_TESTS := tests/autocast/test_autocast.py tests/autocast/test_custom_rules.py \
  tests/autocast/test_matmuls.py tests/linen/test_with_policy.py tests/nnx/test_with_policy.py
flags: export JAX_PLATFORMS ?= cpu
flags: $(STAMP)
	@for each in $(FLAGS) $(NOT_WITH_OTHERS) "$(FLAGS)"; do \
	  echo "$$each:"; \
	  env $$(for flag in $$each; do echo $$flag=1; done) $(PYTEST) -q $(FLAG_TESTS) || exit 1; \
	done

lint: export JAX_PLATFORMS ?= cpu
lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(RUN)
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" pyright --verifytypes mpjax --ignoreexternal
	$(RUN) -m pytest -q -n 2 tests/lint

format: $(STAMP)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# Everything anew each time: a page that is not read again cannot fail. The pages that run do so on the CPU.
SPHINX = $(RUN) -m sphinx -E -a -n -c docs -d build/doctrees
$(VENV)/.docs: $(STAMP)
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@touch $@

docs: export JAX_PLATFORMS ?= cpu
docs: $(VENV)/.docs
	$(SPHINX) -W --keep-going -b html . build/site

# What a release runs first: needs the Pythons that the table of .ci/smoke.py names, a network, and
# hours. Long trainings gain more from XLA's optimization than it takes. An address that this machine
# cannot reach is an error too: it is reported, not hidden. transformers 5 has no Flax.
release: export JAX_PLATFORMS ?= cpu
release: $(VENV)/.docs
	$(RUN) .ci/smoke.py
	XLA_FLAGS="--xla_backend_optimization_level=3 --xla_llvm_disable_expensive_passes=false" \
	  $(PYTEST) -m convergence tests tests/check
	$(RUN) tests/flax_suite/run.py
	$(RUN) -m pip install --quiet --disable-pip-version-check transformers==4.57.6
	$(RUN) -m pytest -q tests/check/test_docs.py -k hugging_face
	$(SPHINX) -D nb_execution_mode=off -b linkcheck . build/linkcheck

# On a machine with an NVIDIA GPU, JAX for CUDA and PyTorch have a venv each: the packages of their
# CUDA libraries overwrite each other. Without PyTorch the rest is measured. BENCH_PYTHON and
# TORCH_PYTHON name interpreters that have all of it already: then nothing is installed.
BENCH_PYTHON ?= $(if $(shell command -v nvidia-smi),$(BENCH_GPU)/bin/python,$(RUN))
TORCH_PYTHON ?= $(if $(filter $(BENCH_GPU)/%,$(BENCH_PYTHON)),$(BENCH_TORCH)/bin/python,$(BENCH_PYTHON))
BENCH_VENVS = $(filter $(STAMP) $(BENCH_GPU)/.installed $(BENCH_TORCH)/.installed,$(patsubst %/bin/python,%/.installed,$(BENCH_PYTHON) $(TORCH_PYTHON)))
SCRIPT ?= run
ifeq ($(SCRIPT),run)
bench: export TORCH_PYTHON := $(TORCH_PYTHON)
bench: $(sort $(BENCH_VENVS))
	PYTHONPATH=. $(BENCH_PYTHON) benchmarks/run.py $(ARGS)
else
# Errors and memory are those of the CPU. Only autocast.py looks for jaxamp, here and in a venv of its own.
bench: export JAX_PLATFORMS ?= cpu
bench: $(STAMP) $(if $(filter autocast,$(SCRIPT)),$(JAXAMP)/.installed)
	PYTHONPATH=.:examples $(RUN) benchmarks/$(SCRIPT).py $(if $(filter autocast,$(SCRIPT)),--jaxamp-python $(JAXAMP)/bin/python) $(ARGS)
endif

$(BENCH_GPU)/.installed: pyproject.toml
	$(PYTHON) -m venv $(BENCH_GPU)
	$(BENCH_GPU)/bin/python -m pip install --quiet --disable-pip-version-check --editable . 'jax[$(CUDA)]'
	@touch $@

$(BENCH_TORCH)/.installed: pyproject.toml
	$(PYTHON) -m venv $(BENCH_TORCH)
	@if $(BENCH_TORCH)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[bench-gpu]'; \
	  then touch $@; else echo "PyTorch is not installed: it will not be measured." >&2; fi

# jaxamp is given the newest JAX with which it can trace every program, beside the one that we need.
$(JAXAMP)/.installed: $(STAMP)
	$(PYTHON) -m venv $(JAXAMP)
	$(JAXAMP)/bin/python -m pip install --quiet --disable-pip-version-check \
	  jaxamp==0.0.4 jax==0.6.2 jaxlib==0.6.2
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable '.[bench]'
	@touch $@

# The compilers for CUDA (0.5 GB) and for TPUs are installed beside the oldest JAX. What XLA fuses, and
# so each bound of a test, belongs to one version of it.
$(COMPILERS)/.installed: pyproject.toml
	@python=$$(.ci/find-python $(OLDEST)) && $$python -m venv $(COMPILERS)
	$(COMPILERS)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]' 'jax[tpu]' || { \
	  echo "make gpu-hlo and make tpu-hlo need libtpu, which pip did not get." >&2; exit 1; }
	@version=$$($(COMPILERS)/bin/python -c 'import jax; print(jax.__version__)'); \
	$(COMPILERS)/bin/python -m pip install --quiet --disable-pip-version-check \
	  jax-cuda12-plugin==$$version jax-cuda12-pjrt==$$version 'nvidia-cuda-nvcc-cu12<13' || { \
	  echo "make gpu-hlo needs jax-cuda12-plugin and jax-cuda12-pjrt $$version, which pip did not get." >&2; \
	  echo "For this CPU instead: PYTHONPATH=. $(COMPILERS)/bin/python benchmarks/gpu_hlo.py --gpu none" >&2; exit 1; }
	@touch $@

# No GPU is looked for: the program is compiled, and never run. In tests that fail, a policy costs
# more than dtypes by hand, loss scaling a kernel for each parameter, or float8 is not float8.
GPU_TESTS := tests/check/test_gpu_hlo.py tests/integration/test_float8.py tests/check/test_gpu_versions.py
gpu-hlo tpu-hlo: export JAX_PLATFORMS = cpu
gpu-hlo: $(COMPILERS)/.installed
	PYTHONPATH=. $(COMPILERS)/bin/python benchmarks/gpu_hlo.py $(ARGS)
	$(COMPILERS)/bin/python -m pytest -q -n 2 -m gpu_compiler $(GPU_TESTS)

tpu-hlo: $(COMPILERS)/.installed
	PYTHONPATH=. $(COMPILERS)/bin/python benchmarks/tpu_hlo.py $(ARGS)
	$(COMPILERS)/bin/python -m pytest -q tests/check/test_tpu_hlo.py

figures: export JAX_PLATFORMS ?= cpu
figures: $(STAMP)
	$(RUN) -m docs.figures $(ARGS)

# Each trainer has an environment of its own in build/trainers.
trainers: export JAX_PLATFORMS = cpu
trainers: $(STAMP)
	@python=$$(.ci/find-python 3.12) && \
	  PYTHONPATH=.:benchmarks $(RUN) benchmarks/trainers/__main__.py --python $$python $(ARGS)

mutations: export JAX_PLATFORMS ?= cpu
mutations: $(STAMP)
	$(RUN) -m tests.mutations.run
	$(RUN) -m tests.mutations.generated $(ARGS)

campaign: export JAX_PLATFORMS ?= cpu
campaign: $(STAMP)
	$(RUN) -m tests.campaign.run
	$(RUN) -m tests.soak

clean:
	rm -rf $(VENV) .venv-oldest .venv-newest $(JAXAMP) $(COMPILERS) $(BENCH_GPU) $(BENCH_TORCH) build dist .cache .hypothesis .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
