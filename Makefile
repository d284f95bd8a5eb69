# make demo   a federation on real digits, in a minute
# make test   every test, in a virtual environment of its own
# make check  what CI runs: lint, types, tests
# make bench  speed against other simulators, half an hour; installs them beside, 3 GB

PYTHON ?= $(shell command -v python3.11 || echo python3)
BIN := .venv/bin
CORE := .venv/.core
TEST := .venv/.test

.PHONY: demo test check lint types bench clean

demo: $(CORE)
	$(BIN)/fedstrata demo

# Files with slow tests go first (tests/conftest.py); one worker more than there are cores, since deployments mostly wait.
# One thread each: more threads than cores would wait for each other, and use up what the others need.
test: $(TEST)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $$(($$(nproc) + 1)) --dist loadfile --no-loadscope-reorder

check: lint types test

lint: $(TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(TEST)
	$(BIN)/mypy

bench: $(TEST)
	benchmarks/peers/setup.sh
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/scaling.py
	$(BIN)/python benchmarks/ray_overhead.py
	$(BIN)/python benchmarks/flower_overhead.py
	$(BIN)/python benchmarks/sizing.py
	$(BIN)/python benchmarks/peers/run.py

$(BIN)/python:
	$(PYTHON) -m venv .venv

# torch comes first and by its pinned version alone: a range would bring the newest build with its GPU packages.
$(CORE): $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	@touch $@

$(TEST): $(CORE)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[test]"
	@touch $@

clean:
	rm -rf .venv build dist src/*.egg-info
