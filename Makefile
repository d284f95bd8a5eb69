# make demo   skewed federations on real digits: who wins, where and why the others fail, what helps; in a minute
# make quick  before a commit, in a minute and a half: lint, types, and ten quick tests of every file
# make test   every test, in a virtual environment of its own
# make check  what CI runs: lint, types, tests
# make docs   the documentation site, in site/; make docs-serve shows it while you write
# make notebooks  runs examples/*.py and writes their notebooks
# make wheel-demo  the wheel, installed without extras, runs the demo: half a minute
# make dist   what is published, in dist/: wheel, source, bill of materials, checksums
# make bench  speed against other simulators, half an hour; installs them beside, 3 GB
# make bench-quick  speed against the bare steps and a loop by hand, minutes; ISA="default avx2" for both instruction sets

PYTHON ?= $(shell command -v python3.11 || echo python3)
BIN := .venv/bin
CORE := .venv/.core
TEST := .venv/.test
TYPES := .venv/.types
DOCS := .venv/.docs
RELEASE := .venv/release

.PHONY: demo quick test check lint types docs docs-serve notebooks bench bench-quick wheel-demo dist clean

# Every test starts processes that import the package: let them find it compiled. One thread each: more threads than
# cores would wait for each other, and use up what the others need.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder

demo: $(CORE)
	$(BIN)/fedstrata demo
	@echo "To have the command fedstrata in this terminal: source $(BIN)/activate"

# Types are checked beside tests, which leave a core idle now and then, and told of at the end; both must be right.
define beside_types
	@echo "$(BIN)/mypy &"; $(BIN)/mypy >$(TYPES) 2>&1 & types=$$!; \
	echo "$(1)"; $(1); tests=$$?; \
	wait $$types; types=$$?; echo "$(BIN)/mypy"; cat $(TYPES); \
	exit $$((tests ? tests : types))
endef

# Which tests are quick: tests/conftest.py.
quick: lint
	$(call beside_types,$(PYTEST) --quick --numprocesses $$(nproc))

# The longest files go first (tests/conftest.py); two workers more than there are cores, since deployments mostly wait.
ALL_TESTS := $(PYTEST) --numprocesses $$(($$(nproc) + 2))

test: $(TEST)
	$(ALL_TESTS)

check: lint
	$(call beside_types,$(ALL_TESTS))

lint: $(TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(TEST)
	$(BIN)/mypy

# Of Material's word on a version of mkdocs that it does not use. A warning fails.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs

docs: $(DOCS)
	$(MKDOCS) build --strict --quiet
	@echo "the site is in site/: open site/index.html"

docs-serve: $(DOCS)
	$(MKDOCS) serve --livereload --watch src --watch website

notebooks: $(TEST)
	$(BIN)/python -m website.build_notebooks

bench: $(TEST)
	benchmarks/peers/setup.sh
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/scaling.py
	$(BIN)/python benchmarks/ray_overhead.py
	$(BIN)/python benchmarks/flower_overhead.py
	$(BIN)/python benchmarks/sizing.py
	$(BIN)/python benchmarks/peers/run.py

ISA := default

bench-quick: $(TEST)
	$(BIN)/python benchmarks/peers/run.py --quick --isa $(ISA)

# What the wheel needs is linked from what is installed already (release/clean_environment.py).
wheel-demo: $(TEST)
	$(BIN)/python release/clean_wheel_demo.py

dist: $(TEST) $(RELEASE)/.done
	$(BIN)/python release/build.py $(RELEASE)/bin/python
	$(BIN)/python release/clean_wheel_demo.py dist/*.whl

$(RELEASE)/.done: release/requirements.txt
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install --quiet -r release/requirements.txt
	@touch $@

$(BIN)/python:
	$(PYTHON) -m venv .venv

# torch comes first and by its pinned version alone: a range would bring the newest build with its GPU packages.
$(CORE): $(BIN)/python pyproject.toml constraints.txt
	@echo "Installing torch and fedstrata into .venv: a few minutes, in silence"
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	@touch $@

$(TEST): $(CORE)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[test]"
	@touch $@

$(DOCS): $(CORE)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[docs]"
	@touch $@

clean:
	rm -rf .venv build site dist src/*.egg-info
