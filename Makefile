# make run    the default run: ten agents on a ring learn handwritten digits
# make test   lint, types, layers, all tests (what CI runs)
# make unit   the tests that take about a minute together
# make bench  speed, as ratios measured in one run
# make docs   the manual as a site, in site/
# make soak   peers under faults, for a few minutes; make fuzz: hostile bytes, for ten minutes
# make simulate   the protocol between peers in 100,000 simulated schedules; FIRST and SCHEDULES select some of them
VENV := .venv
PYTHON := $(VENV)/bin/python
INSTALL := $(VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable
export OMP_NUM_THREADS := 1

.PHONY: run test check lint types layers unit tests browser bench docs soak fuzz simulate clean

run: $(VENV)/installed
	$(VENV)/bin/pdsl run

test: check tests

check: lint types layers

lint: $(VENV)/installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/installed-dev
	$(VENV)/bin/mypy

layers: $(VENV)/installed-dev
	$(VENV)/bin/lint-imports

tests: $(VENV)/installed-dev browser
	$(PYTHON) -m pytest -n 2

unit: $(VENV)/installed-dev
	$(PYTHON) -m pytest -n 2 -m "not slow and not peer and not browser"

browser:  # Chromium for the tests of reports; without it they are skipped, and say so
	@command -v chromium >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq \
	  && apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core >/dev/null; } \
	  || echo "no Chromium here, and no apt-get as root to install it: tests in a browser are skipped"

bench: $(VENV)/installed
	$(PYTHON) -m benchmarks.speed

docs: $(VENV)/installed-docs
	$(VENV)/bin/mkdocs build --strict

soak: $(VENV)/installed-dev
	$(PYTHON) tests/stress/soak.py

fuzz: $(VENV)/installed-dev
	$(PYTHON) tests/stress/fuzz.py

FIRST := 0
SCHEDULES := 100000
simulate: $(VENV)/installed-dev
	$(PYTHON) -m tests.stress.simulation --every-crash
	$(PYTHON) -m tests.stress.simulation --first $(FIRST) --schedules $(SCHEDULES)

$(VENV)/bin/python:
	python3 -m venv $(VENV)

$(VENV)/installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(INSTALL) .
	touch $@

$(VENV)/installed-dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(INSTALL) ".[dev]"
	touch $@ $(VENV)/installed

$(VENV)/installed-docs: $(VENV)/bin/python pyproject.toml constraints.txt
	$(INSTALL) ".[docs]"
	touch $@ $(VENV)/installed

clean:
	rm -rf $(VENV) site .mypy_cache .ruff_cache .pytest_cache .hypothesis
