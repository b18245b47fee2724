# make setup test fuzz-readers lint docs site wheel check-wheel release demo demo-serve bench-memory clean; PYTHON=python3.12 make setup picks another interpreter.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
SITE_VENV := build/site-venv
WORKERS ?= 4
# One thread each; and bytecode is kept, whatever the shell says: dozens of processes would compile the same files anew.
QUIET := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=

.PHONY: setup demo demo-serve test test-slow fuzz-readers lint docs site wheel check-wheel release bench-memory clean

setup: $(INSTALLED)

# torch first: see constraints.txt. Done once, and again when a requirement changes.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt torch
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev,hf]'
	@touch $@

demo: setup
	$(BIN)/foretell run demo

# Trains a byte-level GPT, measures this machine, foretells a load, serves it, and prints predicted beside measured; about three minutes.
demo-serve: setup
	$(BIN)/python benchmarks/demo_serve.py

# Importing torch takes seconds, so a file stays with one worker; a worker uses one core, and often waits for its processes:
# four keep two cores busy. Files go in the order they are collected in: those of many ranks, the longest, first.
test: setup
	$(QUIET) $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow"

# Longer ones: further models, meshes and phases of what `make test` shows, every kind of ejected script.
test-slow: setup
	$(QUIET) $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m slow

# Spoiled files for every reader; FORETELL_FUZZ_SEED=... draws others.
fuzz-readers: setup
	OMP_NUM_THREADS=1 FORETELL_FUZZ_CASES=$${FORETELL_FUZZ_CASES:-2000} $(BIN)/python -m pytest -q tests/pure/test_fuzz_readers.py

lint: setup
	$(BIN)/ruff check foretell tests benchmarks examples .ci
	$(BIN)/mypy

# Writes what the examples of README.md and docs/ print now, and docs/api.md; tests/pure/test_docs.py and test_api_page.py compare them.
docs: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.pure.test_docs --write
	$(BIN)/python -m tests.pure.test_api_page --write

# The pages of docs/ as a site in build/site; a link that leads nowhere fails. Its tools are apart from those of the tests.
site: $(SITE_VENV)/.installed
	$(SITE_VENV)/bin/python -m mkdocs build --strict

$(SITE_VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(SITE_VENV)
	$(SITE_VENV)/bin/python -m pip install -c constraints.txt mkdocs-material
	@touch $@

# A wheel and an sdist in dist/, the second of which builds the first.
wheel: setup
	$(BIN)/python .ci/release.py wheel

# The wheel in an empty environment answers as the checkout does; offline.
check-wheel: setup
	$(QUIET) $(BIN)/python -m pytest -q -m package tests/pure/test_package.py

# All of that, for a clean tree whose changelog has the version; sums and, with a key, a signature. It uploads nothing.
release: setup
	$(QUIET) $(BIN)/python .ci/release.py release

bench-memory: setup
	$(BIN)/python benchmarks/memory.py

# Everything that can be made again.
clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
