# Jobs, each of which sets up everything that it needs, environment included.
PYTHON ?= python3
BIN := .venv/bin

OLDEST := .venv-oldest

.PHONY: demo test oldest

demo: .venv/ready
	$(BIN)/python examples/generate_hybrid.py

test: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/wheel_check.py
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

.venv/ready: pyproject.toml constraints.txt $(wildcard torch_uma/ops/*.c)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	touch $@

# With the oldest transformers that is supported, the tests of what goes through it. It has no looped models.
oldest: $(OLDEST)/ready
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -n 2 -k "not looped" $(addprefix tests/test_, $(addsuffix .py, \
	    versions cache generate ways masks loop chat precision wrong_uses sizing batch_generation forwards))

$(OLDEST)/ready: pyproject.toml constraints.txt $(wildcard torch_uma/ops/*.c)
	$(PYTHON) -m venv $(OLDEST)
	grep -v '^transformers==\|^huggingface_hub==\|^tokenizers==\|^flashinfer' constraints.txt >$(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install -c $(OLDEST)/constraints.txt -e . pytest pytest-xdist hypothesis transformers==5.17.0
	touch $@
