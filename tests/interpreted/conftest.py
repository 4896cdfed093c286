"""The interpreter makes the assertions that a launch on a GPU makes."""

import pytest
from triton.runtime import interpreter


@pytest.fixture(autouse=True)
def asserting(monkeypatch):
    options = interpreter.InterpreterOptions(debug=True, sanitize_overflow=False)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", options)
