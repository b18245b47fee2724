# make setup test fuzz-readers lint docs demo bench-memory clean; PYTHON=python3.12 make setup picks another interpreter.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
WORKERS ?= 3
# One thread each; and bytecode is kept, whatever the shell says: dozens of processes would compile the same files anew.
QUIET := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=

.PHONY: setup demo test test-slow fuzz-readers lint docs bench-memory clean

setup: $(INSTALLED)

# torch first: see constraints.txt. Done once, and again when a requirement changes.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt torch
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev,hf]'
	@touch $@

demo: setup
	$(BIN)/foretell run demo

# Importing torch takes seconds, so a file stays with one worker; a worker uses one core, and often waits for its processes:
# three keep two cores busy. Files go in the order they are collected in: those of many ranks, the longest, first.
test: setup
	$(QUIET) $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow"

# Longer ones: further models, meshes and phases of what `make test` shows, every kind of ejected script.
test-slow: setup
	$(QUIET) $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m slow

# Spoiled files for every reader; FORETELL_FUZZ_SEED=... draws others.
fuzz-readers: setup
	OMP_NUM_THREADS=1 FORETELL_FUZZ_CASES=$${FORETELL_FUZZ_CASES:-2000} $(BIN)/python -m pytest -q tests/pure/test_fuzz_readers.py

lint: setup
	$(BIN)/ruff check foretell tests benchmarks
	$(BIN)/mypy

# Writes what the examples of README.md and docs/ print now; tests/pure/test_docs.py compares them.
docs: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.pure.test_docs --write

bench-memory: setup
	$(BIN)/python benchmarks/memory.py

# Everything that can be made again.
clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
