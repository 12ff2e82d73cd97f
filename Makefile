# make eval and make test set everything up themselves; they need Python 3.11 or later, pip and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup eval test test-all notebooks npu-drift lint format checkpoint pictures clean bench

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.11")'
	@# where Python came without ensurepip (Debian splits it off), its own pip installs pip
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV) && $(PYTHON) -m venv --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }
	@# torch first, on its own: pip is to take the pinned build before anything that asks for a range
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

eval: setup
	$(BIN)/sfa eval --untrained

test: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal

# the full products that make test samples; about half an hour
test-all: setup
	SFA_ALL=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# runs every notebook from nothing, one thread each, and leaves the files as they are
notebooks: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --nbmake --nbmake-timeout=120 --durations=6 notebooks

# compares the operators' schemas with those in the pinned torch_npu wheel, which is unzipped, never installed or run
npu-drift: setup
	mkdir -p build/torch_npu
	test -n "$$(ls build/torch_npu/*.whl 2>/dev/null)" || $(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest build/torch_npu torch_npu==2.13.0
	$(BIN)/python -m zipfile -e build/torch_npu/*.whl build/torch_npu/unzipped
	$(BIN)/python -m pytest tests/sfa_functional/test_npu_drift.py --torch-npu-wheel build/torch_npu/unzipped -rs

# how near the machine's limit; some rows take minutes, `tests/benchmarks/run.py --quick` leaves them out
bench: setup
	$(BIN)/python tests/benchmarks/run.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

checkpoint: setup
	$(BIN)/python sfa_functional/data/make_tiny_dsa.py

# the pictures of README, for light and for dark pages; prints its table of selectors
pictures: setup
	$(BIN)/python notebooks/pictures.py

clean:
	rm -rf $(VENV) build dist *.egg-info
