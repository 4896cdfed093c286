"""What the documents say of the code is so."""

import re
from pathlib import Path

import torch_uma

ROOT = Path(__file__).resolve().parent.parent


def run_block(document: str, number: int = 0) -> dict[str, object]:
    """The names that a document's Python block leaves behind."""
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    exec(blocks[number], names)
    return names


def test_the_architecture_names_every_file():
    text = (ROOT / "docs/architecture.md").read_text()
    package = ROOT / "torch_uma"
    files = {path.relative_to(package).as_posix() for path in package.rglob("*.py") if path.name != "__init__.py"}
    named = re.findall(r"^\| `([\w/]+\.py)` \|", text, re.MULTILINE)
    assert sorted(named) == sorted(files)


def test_a_file_imports_only_from_those_above_it():
    named = re.findall(r"^\| `([\w/]+)\.py` \|", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE)
    order = {name.replace("/", "."): place for place, name in enumerate(named)}
    for module, place in order.items():
        source = (ROOT / "torch_uma" / (module.replace(".", "/") + ".py")).read_text()
        for imported in re.findall(r"^from torch_uma\.([\w.]+) import", source, re.MULTILINE):
            assert order.get(imported, -1) < place, f"{module} imports {imported}, which stands below it"


def test_the_arena_of_the_drawing_is_what_the_plan_gives():
    example = run_block("docs/arena.md")["example"]
    assert isinstance(example, torch_uma.Plan)
    text = (ROOT / "docs/arena.md").read_text()
    rows = re.findall(r"^\| (\w+) \| (up|down|float) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|", text, re.MULTILINE)
    assert [(name, grows, *map(int, numbers)) for name, grows, *numbers in rows] == [
        (s.name, s.grows, s.page_bytes, s.origin_bytes, s.first_page, s.num_pages) for s in example.subpools
    ]
    assert (example.arena_bytes, example.sink_bytes) == (4096, 640)


def test_the_readme_makes_a_pool_without_a_model_library():
    pool = run_block("README.md", 2)["pool"]
    assert isinstance(pool, torch_uma.CachePool)
    assert [subpool.name for subpool in pool.plan.subpools] == ["state", "window_128", "full"]
