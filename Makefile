# make demo | make test | make check | make bench | make campaign. Each makes the virtual environment it needs.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
SEED ?= 7

.PHONY: demo test check bench campaign clean

# what `repro` itself needs
$(VENV)/.runtime: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints.txt -e .
	touch $@

# and what its tests need: trainers, engines, a cluster, a browser's driver
$(VENV)/.done: $(VENV)/.runtime
	$(PIP) -c constraints.txt -e '.[dev,sglang-cpu]'
	$(PIP) -c constraints.txt --no-deps sglang # its own pins are those of a GPU machine
	touch $@

demo: $(VENV)/.runtime
	$(BIN)/repro demo --seed $(SEED) --out demo-result

check: $(VENV)/.done
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check
	$(BIN)/pytest -n 2 --dist worksteal -m 'not campaign'

campaign: check
	$(BIN)/pytest -n 2 --dist worksteal -m campaign

bench: $(VENV)/.done
	$(BIN)/python benchmarks/cpu.py

clean:
	rm -rf $(VENV) demo-result
