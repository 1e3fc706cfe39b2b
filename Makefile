# make demo | test | test-all | campaign | mutants | real | check | bench. Each makes the environment it needs.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PYTEST := $(BIN)/pytest -n 2 --dist worksteal
SEED ?= 7
unexport PYTHONDONTWRITEBYTECODE # or each process that the tests start would compile all of us

.PHONY: demo test test-all campaign mutants real peers check lint types imports fast bench clean

# what the demo needs
$(VENV)/.runtime: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints.txt -e '.[trainer,golden,report,fast,doctor]'
	touch $@

# and what the tests need: every part of it, an engine, a cluster, a browser's driver
$(VENV)/.done: $(VENV)/.runtime
	$(PIP) -c constraints.txt -e '.[all,dev,sglang-cpu]'
	$(PIP) -c constraints.txt --no-deps sglang # its own pins are those of a GPU machine
	touch $@

# and the whole tier: trainers
$(VENV)/.whole: $(VENV)/.done
	$(PIP) -c constraints.txt -e '.[whole]'
	touch $@

demo: $(VENV)/.runtime
	$(BIN)/repro demo --seed $(SEED) --out demo-result

check: lint types imports

lint: $(VENV)/.done
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/.done
	$(BIN)/mypy

imports: $(VENV)/.done
	$(BIN)/lint-imports --no-logo

# linters beside the tests, not before them
test: $(VENV)/.done
	$(MAKE) --no-print-directory -j3 check fast

fast: $(VENV)/.done
	$(PYTEST) -m 'not whole and not campaign'

test-all: check $(VENV)/.whole
	$(PYTEST) -m 'not campaign' --hypothesis-profile=whole

# hours: planted changes, faults, hostile input and so on, then real regressions as below
campaign: check $(VENV)/.whole
	failed=; \
	$(PYTEST) -m campaign --hypothesis-profile=whole || failed=1; \
	$(BIN)/python benchmarks/campaign/campaign.py || failed=1; \
	$(MAKE) --no-print-directory -k peers real || failed=1; \
	test -z "$$failed"

mutants: $(VENV)/.whole
	$(PIP) -c constraints.txt -e '.[mutants]'
	$(BIN)/python benchmarks/mutants.py

# real regressions in their own histories: hours, and the network unless REAL='--repositories DIR'
real: $(VENV)/.whole
	$(BIN)/python benchmarks/real/real.py $(REAL)

# the field's checks on the same changes; the real ones only with REAL='--repositories DIR'
peers: $(VENV)/.whole
	$(PIP) --no-deps traincheck==0.2.0 astor==0.8.1 # its own pins are of another torch
	$(BIN)/python benchmarks/peers.py $(REAL)

bench: $(VENV)/.whole
	$(BIN)/python benchmarks/cpu.py

clean:
	rm -rf $(VENV) demo-result
