# The commands of this repository. Developers and CI run the same targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := demo/digits
DEMO_EXTRAS := serving,sweeps,train,ui,views
NAME ?=
OUT ?= .
ARGS ?=
DIST ?= dist

# The inner rings of tests (see pyproject.toml), which need neither Ray nor a server, a browser or an installation.
INNER := pure or process or local
# Three processes, although two cores are enough: the inner rings wait now and then. Three clusters of Ray at once are too
# many for two cores, so the outer rings have two.
PYTEST := $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder --durations=10

export RUFF_CACHE_DIR := $(CURDIR)/.ruff_cache# not in the template's folder, which has its own settings

.PHONY: help demo test test-all test-rest test-gpu check format bench chaos bake docs dist clean
.DEFAULT_GOAL := help

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed 's/:.*## /\t/' | expand -t 12

demo: $(VENV)/.demo $(DEMO)/main.py ## generate an experiment in demo/digits and train it on real images, with two DDP workers
	@$(MAKE) --no-print-directory -C $(DEMO) bind run PYTHON=$(abspath $(BIN)/python) ARGS="$(ARGS)"

test: $(VENV)/.dev ## run the tests that need only processes on this machine; ARGS="-k name" selects tests
	$(PYTEST) -n 3 -m "$(INNER)" $(ARGS)

test-all: $(VENV)/.dev ## run all tests, including Ray, S3, a browser, kills and fresh installations
	$(PYTEST) -n 2 -m "not gpu" $(ARGS)

test-rest: $(VENV)/.dev ## run the tests that `make test` skips
	$(PYTEST) -n 2 -m "not ($(INNER) or gpu)" $(ARGS)

test-gpu: ## on a machine with GPUs: run their tests and measurements, in .venv if it exists, otherwise with PYTHON
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) tests/gpu.py $(ARGS)

check: $(VENV)/.dev ## check style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev ## fix style and formatting for `make check`
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.bench ## compare with torchrun, Accelerate and Lightning, and write docs/benchmarks.md; an hour
	$(BIN)/python benchmarks/run.py $(ARGS)

chaos: $(VENV)/.dev ## kill parts of a run 50 times per engine, local and Ray, and compare the weights; an hour
	$(BIN)/python tests/faults.py $(ARGS)
	KILLS=20 $(BIN)/python -m pytest tests/runtime/companions -k "random_moments or killed_while_saving or before_any_write"

bake: $(VENV)/.complete ## generate an experiment: make bake NAME=my-experiment OUT=..
	@test -n "$(NAME)" || { echo "error: NAME is missing; type make bake NAME=my-experiment OUT=.." >&2; exit 2; }
	@$(BIN)/mlx train new "$(NAME)" -o "$(OUT)"

docs: $(VENV)/.dev ## update the command output and the pictures in README.md and the guides, and the API reference
	$(BIN)/python docs/api.py
	$(BIN)/python docs/readme.py
	$(BIN)/python docs/screenshot.py
	$(BIN)/python docs/page.py
	$(BIN)/python docs/tuning.py

dist: ## build the wheel of the runtime, which contains the templates, in dist/
	@$(PYTHON) -m pip wheel -q --no-deps -w $(DIST) ./runtime

clean: ## delete the demo, the wheel, the environment and caches
	rm -rf demo dist $(VENV) .pytest_cache .ruff_cache .mypy_cache

$(DEMO)/main.py: | $(VENV)/.complete
	@$(BIN)/mlx train new digits -o demo >/dev/null

$(VENV)/.demo: $(VENV)/.complete <<cookiecutter.experiment_name>>/requirements.txt
	@$(call install,-e "runtime[$(DEMO_EXTRAS)]" -r "<<cookiecutter.experiment_name>>/requirements.txt")
	@touch $@

$(VENV)/.complete: runtime/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "error: Python 3.10 or newer is needed, this is " + sys.version.split()[0])'
	@echo "installing into $(VENV) (once; a minute or two)"
	@$(PYTHON) -m venv $(VENV)
	@$(call install,-e runtime)
	@touch $@

$(VENV)/.bench: $(VENV)/.dev benchmarks/requirements.txt  # the tests start the clusters that are measured
	@$(call install,-r benchmarks/requirements.txt)
	@touch $@

$(VENV)/.dev: $(VENV)/.complete
	@echo "installing the development tools into $(VENV)"
	@$(call install,-e "runtime[dev]" -r "<<cookiecutter.experiment_name>>/requirements.txt")
	@touch $@

# Install $(1) with uv, or with pip if uv fails, and constraints.txt. uv does not read pip's settings, so pass it pip's
# package sources.
PIP := $(BIN)/python -m pip --disable-pip-version-check
SOURCES := s/^.*\.index-url=/UV_DEFAULT_INDEX=/p; /\.find-links=/y/ /,/; s/^.*\.find-links=/UV_FIND_LINKS=/p; \
	s/^.*\.extra-index-url=/UV_INDEX_STRATEGY=unsafe-best-match UV_INDEX=/p; \
	s/^.*\.no-index=/UV_NO_INDEX=/p; s/^.*\.constraint=/UV_CONSTRAINT=/p; s/^.*\.cert=/SSL_CERT_FILE=/p
export UV_COMPILE_BYTECODE ?= $(if $(PYTHONDONTWRITEBYTECODE),1,0)# unless runs write the bytecode
define install
( $(PIP) install -q --retries 1 --only-binary uv uv && \
	set -a && eval "$$($(PIP) config list | sort -r | sed -n '$(SOURCES)')" && \
	UV_CONSTRAINT="constraints.txt $$UV_CONSTRAINT" $(BIN)/python -m uv pip install -q --python $(BIN)/python $(1) ) 2>$(VENV)/uv.log || \
{ echo "uv failed (see $(VENV)/uv.log); installing with pip, which takes several minutes"; $(PIP) install -q -c constraints.txt $(1) 2>$(VENV)/pip.log; } || \
{ if grep -q "connection broken" $(VENV)/pip.log; \
	then echo "error: cannot reach the package index; check the network and pip's settings, then run make again" >&2; \
	else cat $(VENV)/pip.log >&2; fi; exit 1; }
endef
