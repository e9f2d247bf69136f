# Two commands do everything on a fresh machine with Python 3.11 or newer: `make demo`, `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NPM := $(shell command -v npm)
UV := $(shell command -v uv)
# With uv, where it is there: a few times as fast as pip.
INSTALL := $(if $(UV),uv pip install --python $(BIN)/python,$(BIN)/pip install) --quiet --constraint constraints.txt
PAGES := cleave/server/web/index.html
PAGE_SOURCES := $(shell find web_client -type f -not -path '*/node_modules/*' -not -path '*/tests/*' -not -name '*.wasm')

# Processes that tests start import the same files again and again; where the environment forbids to
# keep their bytecode, each compiles them anew.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo demo-125m example test test-all unit coverage package lint docs setup web clean

# Without npm everything but the web pages works.
setup: $(VENV)/ready $(if $(NPM),web)

web: $(PAGES)

$(PAGES): $(PAGE_SOURCES)
	cd web_client && npm ci --no-audit --no-fund && npm run build

# What tests need is not installed for the demo; `make setup` adds it.
$(VENV)/train: pyproject.toml constraints.txt setup.py
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Cleave needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable '.[train]'
	touch $@

$(VENV)/ready: $(VENV)/train
	$(INSTALL) --editable '.[dev]'
	touch $@

demo: $(VENV)/train
	$(BIN)/cleave demo

# OPT-125M through a parameter server and eight emulated devices, some minutes.
demo-125m: setup
	$(BIN)/cleave train --model opt-125m --devices 8 --method tiles --steps 20 --eval-every 10

# Fine-tunes a real model with two joined devices, as docs/finetuning.md tells it; a few minutes.
example: setup
	examples/smollm2/run.sh smollm2

# One thread for each worker: two of each would wait for one another on two cores. A third worker
# computes while the others wait for processes and browsers; a fourth makes nothing faster.
# TESTS: files or folders; all by default.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder --durations 15 $(TESTS)
	$(if $(NPM),cd web_client && { [ -d node_modules ] || npm ci --no-audit --no-fund; } && npm run check && npm test,true)

# Every example of every property, and the tests marked `nightly`.
test-all:
	CLEAVE_TESTS=all $(MAKE) test

# The fast loop: under a minute on two cores.
unit: setup
	CLEAVE_TESTS=unit OMP_NUM_THREADS=1 $(BIN)/pytest --unit -n 2 --dist worksteal

# Lines that the tests run, in the terminal and in htmlcov/index.html.
coverage: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile --cov --cov-report=term:skip-covered --cov-report=html

# The wheel, tried in empty environments.
package: setup
	$(BIN)/python -m tools.try_package

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation as a site, in build/site.
docs: $(VENV)/docs
	$(BIN)/mkdocs build --strict

$(VENV)/docs: $(VENV)/train
	$(INSTALL) --editable '.[docs]'
	touch $@

clean:
	rm -rf $(VENV)
