"""docs/compatibility.md says what works with what: every test that it names is there, every refusal is raised.

`python tests/test_compatibility.py` writes the page from `compatibility.py` and from what the errors say.
"""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import refusals
import torch
from compatibility import CELLS, KINDS, SERVED, WAYS
from served import assert_all_free, assert_as_alone, model_of, prompt_of, tight_pool

import torch_uma

torch.set_num_threads(1)

TESTS = pathlib.Path(__file__).parent
PAGE = TESTS.parent / "docs" / "compatibility.md"
HEAD = """# What works with what

Rows are kinds of memory, columns ways of using it. **yes** is followed by the tests that show it, **no** by the error
that is raised; both may be true of one place, under conditions that the note says. **eager** steps are left as they are
where they would be compiled. An empty place is neither shown by a test nor refused: it may work.

Models may have several of these kinds, layer by layer, and what one of them refuses is refused for the model;
[models.md](models.md) has every decoder by its name.

`python tests/test_compatibility.py` writes this page. As a test it sees that the tests which are named are there, and
raises every error.
"""
KIND_NOTES = """\
- **compressed groups**: DeepSeek-V4, one entry for each whole group of tokens, beside windows and states.
- **index keys**: models that choose the keys that they attend to, as DeepSeek-V3.2.
- **states that start anew**: Mamba-1 and its kin, in a forward of several tokens.
- **looped layers**: layers that run several times in a forward, each time with memory of its own.
- **several devices**: a model whose layers are spread, with a pool on each device.
"""


@cache
def functions() -> dict[str, dict[str, set[str]]]:
    """By the name of the file and of the test: the words that its parameters may be made of."""
    found: dict[str, dict[str, set[str]]] = {}
    words: dict[str, set[str]] = {}
    imports: dict[str, set[str]] = {}
    for path in sorted(TESTS.glob("*.py")):
        tree = ast.parse(path.read_text())
        words[path.stem] = {
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        imports[path.stem] = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        imports[path.stem] |= {
            name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names
        }
        found[path.stem] = {
            node.name: words[path.stem] if node.decorator_list else set()
            for node in tree.body
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        }
    for stem, tests in found.items():
        around = set().union(*(words[name] for name in imports[stem] if name in words and not name.startswith("test_")))
        found[stem] = {name: known | around if known else known for name, known in tests.items()}
    return found


def entries() -> Iterator[tuple[str, str]]:
    """Every test that is named, as "file::function" and the parameter or nothing."""
    for cell in (cell for cells in CELLS.values() for cell in cells.values()):
        for entry in cell:
            if "!" not in entry:
                name, _, parameter = entry.removeprefix("~").partition("[")
                yield name, parameter.removesuffix("]")


def sentence(case: str) -> str:
    """What is said of a case that is refused: the error, and what it says up to what would help."""
    with pytest.raises(Exception) as caught:
        refusals.CASES[case]()
    message = str(caught.value)
    if traced := re.search(r"raised exception (\w+)\([\"'](.*)[\"']\)", message):  # as torch.compile tells of it
        message = f"{traced[1]}: {traced[2]}"
    message = message.strip().splitlines()[0].split("; ")[0]
    return f"`{type(caught.value).__name__}`: {message.replace('|', '/')}"


class Notes:
    """The notes of a page, numbered as they come, each once."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def mark(self, text: str) -> str:
        if text not in self.texts:
            self.texts.append(text)
        return f"[^{self.texts.index(text) + 1}]"


def page() -> str:
    """The page as it should be."""
    sentences = {case: sentence(case) for case in refusals.CASES}
    notes = Notes()
    parts = [HEAD]
    for title, ways in WAYS.items():
        if not any(way in cells for way in ways for cells in CELLS.values()):
            continue
        rows = [
            "| " + " | ".join(["", *ways.values()]) + " |",
            "| " + " | ".join(["---"] * (1 + len(ways))) + " |",
        ]
        for kind, name in KINDS.items():
            cells = [shown(CELLS[kind].get(way, ()), sentences, notes) for way in ways]
            rows.append("| " + " | ".join([name, *cells]) + " |")
        parts += [f"## {title}\n", "\n".join(rows) + "\n"]
    parts += [KIND_NOTES, *(f"[^{number}]: {text}" for number, text in enumerate(notes.texts, 1))]
    return "\n".join(parts) + "\n"


def shown(cell: tuple[str, ...], sentences: dict[str, str], notes: Notes) -> str:
    words = {"yes": "", "eager": "", "no": ""}
    for entry in cell:
        condition, is_refused, case = entry.rpartition("!")
        if is_refused:
            words["no"] += notes.mark(f"{condition}: {sentences[case]}".removeprefix(": "))
        else:
            name, _, parameter = entry.removeprefix("~").partition("[")
            stem, function = name.split("::")
            parameter = f" with `{parameter.removesuffix(']')}`" if parameter else ""
            note = f"[test_{stem}.py](../tests/test_{stem}.py)::test_{function}{parameter}"
            words["eager" if entry.startswith("~") else "yes"] += notes.mark(note)
    return ", ".join(word + marks for word, marks in words.items() if marks)


def test_every_test_that_is_named_is_there() -> None:
    known = functions()
    for name, parameter in entries():
        stem, function = (f"test_{part}" for part in name.split("::"))
        assert function in known.get(stem, {}), f"tests/{stem}.py has no {function}"
        words = known[stem][function]
        assert not parameter or parameter in words, f"{stem}::{function} knows no {parameter!r}"


def test_rows_columns_and_refusals_are_those_that_there_are() -> None:
    ways = {way for columns in WAYS.values() for way in columns}
    assert set(CELLS) == set(KINDS) and all(set(cells) <= ways for cells in CELLS.values())
    cells = [entry for cells in CELLS.values() for cell in cells.values() for entry in cell]
    assert {entry.rpartition("!")[2] for entry in cells if "!" in entry} == set(refusals.CASES)


@pytest.mark.parametrize(("name", "attention", "host_memory"), SERVED)
def test_a_batch_over_little_memory(name: str, attention: str, host_memory: int | str) -> None:
    """With one round in flight, requests are retracted and get the tokens of `generate()`."""
    model: Any = model_of(name, attention)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24}
    longest = torch_uma.plan(model, memory="1GiB", page_size=4).bytes_per_sequence(64)
    pool = tight_pool(model, f"{1.9 * longest:.0f}")
    prompts = [prompt_of(num_tokens) for num_tokens in (20, 24, 17, 31)]
    loops: list[torch_uma.ServingLoop] = []
    generations = torch_uma.generate_batch(
        model,
        prompts,
        pool=pool,
        max_running=4,
        step_tokens=24,
        host_memory=host_memory,
        overlap=True,
        on_event=lambda loop, event: loops.append(loop),
        **options,
    )
    for generation in generations:
        assert_as_alone(model, generation, **options)
    stats = loops[0].scheduler.stats()
    print(stats)
    assert (stats.offloaded if host_memory else stats.dropped) > 0 or name in (
        "deepseek_v4",
        "mamba",
    )  # that hardly grow
    assert_all_free(pool)


def test_the_page_says_what_is_so() -> None:
    assert PAGE.read_text() == page(), "run python tests/test_compatibility.py"
    assert all(re.match(r"\[\^\d+\]: ", line) for line in PAGE.read_text().splitlines() if line.startswith("[^"))


if __name__ == "__main__":
    PAGE.write_text(page())
