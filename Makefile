# `make` alone prints the targets. Everything is installed in .venv; nothing outside this folder is touched.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
QUICK := not slow and not rdma and not interop and not bench
ALL := not rdma and not interop and not bench

# Stamps: a second `make test` finds them newer than pyproject.toml and installs nothing.
VENV_STAMP := $(VENV)/.made
INSTALLED := $(VENV)/.installed
DEV_INSTALLED := $(VENV)/.installed-dev

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all lab interop cover lint format types peers bench fuzz wheel clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "  PYTHON=python3.12 make ... uses another interpreter for a new .venv"

demo: $(INSTALLED) ## move blocks between two processes, over every transport that works here
	$(BIN)/kvxfer demo

test: $(DEV_INSTALLED) ## the quick tests
	$(BIN)/python -m pytest -q -m "$(QUICK)"

test-all: $(DEV_INSTALLED) ## the slow tests too
	$(BIN)/python -m pytest -q -m "$(ALL)"

lab: $(DEV_INSTALLED) ## the RDMA tests, in guests with soft-RoCE devices (QEMU; LAB=uml: User-Mode Linux)
	bash tests/lab/run-tests.sh

interop: $(DEV_INSTALLED) peers ## the tests against other engines and their servers, installed where missing
	$(BIN)/python -m pytest -q -m "interop and not rdma"

cover: $(DEV_INSTALLED) ## test-all with the lines that no test reaches
	$(BIN)/python -m coverage erase
	$(BIN)/python -m coverage run -m pytest -q -m "$(ALL)"
	$(BIN)/python -m coverage combine
	$(BIN)/python -m coverage report

lint: $(DEV_INSTALLED) ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(DEV_INSTALLED) ## let ruff put right what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(DEV_INSTALLED) ## mypy --strict
	$(BIN)/mypy --strict kvxfer

peers: ## install the engines that `make bench` compares with
	PYTHON=$(PYTHON) bash bench/install_peers.sh

bench: $(INSTALLED) ## compare with the engines that are installed
	$(BIN)/python bench/peers.py

fuzz: $(DEV_INSTALLED) ## random engines, peers and faults for a long time
	$(BIN)/python tests/fuzz/run.py

wheel: $(VENV_STAMP) ## dist/kvxfer-*-py3-none-any.whl
	$(PIP) wheel --no-deps --wheel-dir dist .

clean: ## remove what make made (not bench/.peers)
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find kvxfer tests bench -path bench/.peers -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# An interpreter without ensurepip is the usual fault of a bare Debian; venv would leave half a folder behind.
$(VENV_STAMP):
	@command -v $(PYTHON) >/dev/null || { \
	    echo "There is no $(PYTHON). Install it: apt-get install python3 python3-venv; or name one: make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "$(PYTHON) is $$($(PYTHON) -V), kvxfer needs 3.10 or newer; name one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "$(PYTHON) cannot make virtual environments. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(INSTALLED): $(VENV_STAMP) pyproject.toml
	$(PIP) install --editable .
	@touch $@

$(DEV_INSTALLED): $(VENV_STAMP) pyproject.toml
	$(PIP) install --editable '.[dev]'
	@touch $@ $(INSTALLED)
