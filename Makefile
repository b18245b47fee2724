# make setup test fuzz-readers lint demo bench-memory clean; PYTHON=python3.12 make setup picks another interpreter.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
WORKERS ?= 3

.PHONY: setup demo test test-slow fuzz-readers lint bench-memory clean

setup: $(INSTALLED)

# torch first: see constraints.txt. Done once, and again when a requirement changes.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt torch
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev,hf]'
	@touch $@

demo: setup
	$(BIN)/foretell demo

# Importing torch takes seconds, so a file stays with one worker; a worker uses one core, and often waits for its processes:
# three keep two cores busy.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile -m "not slow"

# Longer ones: every case of context and expert parallel, every kind of ejected script.
test-slow: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile -m slow

# Spoiled files for every reader; FORETELL_FUZZ_SEED=... draws others.
fuzz-readers: setup
	OMP_NUM_THREADS=1 FORETELL_FUZZ_CASES=$${FORETELL_FUZZ_CASES:-2000} $(BIN)/python -m pytest -q tests/pure/test_fuzz_readers.py

lint: setup
	$(BIN)/ruff check foretell tests benchmarks
	$(BIN)/mypy

bench-memory: setup
	$(BIN)/python benchmarks/memory.py

# Everything that can be made again.
clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
