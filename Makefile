# Two commands do all the set-up on a machine with Python >= 3.11 and pip: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
PIP = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check
# Tests build models with torch.  Any release the project accepts will do; on a machine without a GPU point pip at a
# CPU build (TORCH="torch==2.13.0+cpu", TORCH_FLAGS="--index-url ..."), since some platforms' default is a CUDA build.
TORCH ?= torch==2.13.0
TORCH_FLAGS ?=
OUT ?= out
WORKERS ?= 2

.PHONY: demo test test-all test-keras lint bench clean

demo: $(VENV)/.product
	$(VENV)/bin/python examples/california/demo.py --output $(OUT)/california

test: $(VENV)/.tests
	$(VENV)/bin/python -m pytest -n $(WORKERS) -m "not slow"

test-all: $(VENV)/.tests
	$(VENV)/bin/python -m pytest -n $(WORKERS)

# Tests that write Keras models with tf2onnx; apart, since tensorflow is larger than everything else together.
test-keras: $(VENV)/.tests
	$(PIP) --editable ".[keras]"
	$(VENV)/bin/python -m pytest tests/test_keras.py

lint: $(VENV)/.tests
	$(VENV)/bin/ruff check .

bench: $(VENV)/.tests
	$(VENV)/bin/python benchmarks/ibp.py --write docs/benchmarks.md

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip

$(VENV)/.product: pyproject.toml | $(VENV)/bin/python
	$(PIP) --editable .
	touch $@

$(VENV)/.tests: pyproject.toml | $(VENV)/bin/python
	$(PIP) $(TORCH_FLAGS) "$(TORCH)"
	$(PIP) --editable ".[torch,test]"
	touch $@ $(VENV)/.product

clean:
	rm -rf $(VENV) $(OUT) build *.egg-info
