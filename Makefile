# Two jobs, each of which sets up everything that it needs, environment included.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test

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
