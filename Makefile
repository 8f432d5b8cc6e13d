# Two commands on a machine with Python >= 3.11 and make:
#
#   make demo   environment, install, quantize the built-in model to INT8, judge it, serve it, ask it a question
#   make test   environment, install with test extras, lint, types, tests
#
# Both may be run again: what is done already is not done twice. Variables:
#   PYTHON       the Python that makes the environment (python3)
#   JOBS         processes that run tests (2; each takes about 2 GB)
#   TORCH_INDEX  a package index to take torch from first, for PyTorch's CPU wheels (see the README)

PYTHON ?= python3
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
DEMO := demo/smollm2-135m-int8
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

.PHONY: demo test slow clean
.DELETE_ON_ERROR:

demo: $(DEMO)/qinfer_gate.json
	$(BIN)/qinfer inspect $(DEMO)
	$(BIN)/python examples/ask_server.py $(DEMO) "What is the capital of France? Answer in one sentence."

$(DEMO)/qinfer_gate.json: | $(VENV)/installed
	$(BIN)/qinfer quantize smollm2-135m-instruct --scheme int8 --out $(DEMO) --overwrite

test: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile

# what takes minutes: full calibrations, the real model under every preset
slow: $(VENV)/installed-test
	$(BIN)/python -m pytest -m slow

$(VENV)/installed: $(VENV)/torch
	$(PIP) -e .
	touch $@

$(VENV)/installed-test: $(VENV)/torch
	$(PIP) -e '.[test]'
	touch $@ $(VENV)/installed

$(VENV)/torch: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "qinfer needs Python 3.11 or newer: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "$(PYTHON) cannot make an environment (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 2; }
	$(if $(TORCH_INDEX),$(PIP) --index-url $(TORCH_INDEX) torch)
	touch $@

clean:
	rm -rf $(VENV) demo build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
