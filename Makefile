# make run    the main job: ten agents on a ring learn handwritten digits
# make test   lint, types, all tests
# make bench  speed, as ratios measured in one run
# make docs   the manual as a site, in site/
VENV := .venv
PYTHON := $(VENV)/bin/python
export OMP_NUM_THREADS := 1

.PHONY: run test check lint types unit bench docs clean

run: $(VENV)/installed
	$(VENV)/bin/pdsl run

test: lint types unit

check: lint types

lint: $(VENV)/installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/installed-dev
	$(VENV)/bin/mypy

unit: $(VENV)/installed-dev
	$(PYTHON) -m pytest -n 2

bench: $(VENV)/installed
	$(VENV)/bin/pdsl bench

docs: $(VENV)/installed-docs
	$(VENV)/bin/mkdocs build --strict

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
