# make run    the main job: ten agents on a ring learn handwritten digits
# make test   lint, types, all tests
# make bench  speed, as ratios measured in one run
# make docs   the manual as a site, in site/
# make soak   peers under faults, for a few minutes; make fuzz: bytes from outside, for ten minutes
VENV := .venv
PYTHON := $(VENV)/bin/python
export OMP_NUM_THREADS := 1

.PHONY: run test check lint types unit browser bench docs soak fuzz clean

run: $(VENV)/installed
	$(VENV)/bin/pdsl run

test: lint types unit

check: lint types

lint: $(VENV)/installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/installed-dev
	$(VENV)/bin/mypy

unit: $(VENV)/installed-dev browser
	$(PYTHON) -m pytest -n 2

browser:  # Chromium for the tests of pages, where it can be had; else they are skipped, and say so
	@command -v chromium >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq \
	  && apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core >/dev/null; } \
	  || echo "no Chromium here, and no apt-get as root to install it: tests in a browser are skipped"

bench: $(VENV)/installed
	$(VENV)/bin/pdsl bench

docs: $(VENV)/installed-docs
	$(VENV)/bin/mkdocs build --strict

soak: $(VENV)/installed-dev
	$(PYTHON) benchmarks/soak.py

fuzz: $(VENV)/installed-dev
	$(PYTHON) benchmarks/fuzz.py

$(VENV)/bin/python:
	python3 -m venv $(VENV)

$(VENV)/installed: $(VENV)/bin/python pyproject.toml
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/installed-dev: $(VENV)/bin/python pyproject.toml
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@ $(VENV)/installed

$(VENV)/installed-docs: $(VENV)/bin/python pyproject.toml
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --editable ".[docs]"
	touch $@ $(VENV)/installed

clean:
	rm -rf $(VENV) site .mypy_cache .ruff_cache .pytest_cache .hypothesis
