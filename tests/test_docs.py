"""What the documents say of the code is so."""

import asyncio
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import BUILDERS, build, prompts, tokenizer

import torch_uma

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def run_block(document: str, number: int = 0, **names: Any) -> dict[str, Any]:
    """The names that a document's Python block leaves behind, given these."""
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


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_what_a_page_links_to_is_there(page):
    """Files and folders; and headings of this page and of others."""
    links = re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text())
    for target, _, heading in (link.partition("#") for link in links):
        there = (page.parent / target) if target else page
        assert there.exists(), f"{page.name} links to {target}"
        if heading:
            titles = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE)
            assert heading in {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_arena_of_the_drawing_is_what_the_plan_gives():
    example = run_block("docs/arena.md")["example"]
    assert isinstance(example, torch_uma.Plan)
    text = (ROOT / "docs/arena.md").read_text()
    rows = re.findall(r"^\| (\w+) \| (up|down|float) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|", text, re.MULTILINE)
    assert [(name, grows, *map(int, numbers)) for name, grows, *numbers in rows] == [
        (s.name, s.grows, s.page_bytes, s.origin_bytes, s.first_page, s.num_pages) for s in example.subpools
    ]
    assert (example.arena_bytes, example.sink_bytes) == (4096, 640)


@pytest.mark.parametrize("name", BUILDERS)
def test_what_the_readme_does_with_a_model(name):
    model = build(name, attention="eager")
    given = {"model": model, "inputs": prompts((9, 4)), "prompt": prompts((12,))["input_ids"]}
    given = run_block("README.md", 0, **given)
    assert given["cache"].get_seq_length() > 9
    run_block("README.md", 1, **given)
    assert model.config._attn_implementation == "torch_uma"
    given = run_block("README.md", 2, tokenizer=tokenizer(), prompts=[[1, 2, 3], [4, 5]], **given)
    assert given["generation"].prompt == [4, 5] and len(given["generation"].tokens) == 64
    given = run_block("README.md", 3, **given)
    assert given["branch"].pool.closed and given["logits"].shape[1] == 1


@pytest.mark.parametrize("name", BUILDERS)
def test_what_the_usage_page_does(name):
    model = build(name, attention="eager")
    with torch_uma.CachePool(model, memory="4MiB") as pool:
        first, second = pool.add_many([5, 7])
        for sequence, length in ((first, 4), (second, 6)):
            with torch.no_grad(), pool.step({sequence: length}) as cache:
                model(prompts((length,))["input_ids"], cache=cache, **cache.inputs())
        run_block(
            "docs/usage.md", 0, first=first, second=second, pool=pool, model=model, input_ids=torch.tensor([[1], [2]])
        )
        assert (first.length, second.length) == (5, 7)
        model.set_attn_implementation("torch_uma")
        torch.compiler.reset()
        batch = pool.batch([first, second])
        run_block("docs/usage.md", 2, batch=batch, pool=pool, model=model, input_ids=torch.tensor([[1], [2]]))
        assert (first.length, second.length) == (6, 8)
        given = {"batch": batch, "pool": pool, "compiled": model, "max_tokens": 64, "torch": torch}
        run_block("docs/usage.md", 3, input_ids=torch.tensor([[1], [2]]), **given)
        assert (first.length, second.length) == (7, 9)
        if name == "gpt_oss":
            new = [prompts((length,))["input_ids"] for length in (1, 130)]
            run_block("docs/usage.md", 1, first=first, second=second, pool=pool, model=model, new=new)
            assert (first.length, second.length) == (8, 139)
            given = {"batch": batch, "pool": pool, "model": model, "end_token": -1}
            run_block("docs/usage.md", 4, input_ids=torch.tensor([[1], [2]]), **given)
            assert (first.length, second.length) == (16, 147)
        pool.check()


def test_what_the_usage_page_does_to_make_room(capsys):
    with torch_uma.CachePool(build("bamba"), memory="1MiB") as pool:
        sequence = pool.add()
        pool.begin([sequence], 9).commit()
        given = run_block("docs/usage.md", 7, pool=pool, sequence=sequence)
        assert given["sequence"] is not sequence and given["sequence"].length == 9
        assert capsys.readouterr().out.startswith("Offloaded(9 tokens, ")
        pool.check()


@pytest.mark.parametrize("name", BUILDERS)
def test_what_the_usage_page_does_to_speculate(name):
    model = build(name, attention="eager")
    inputs = prompts((9,))
    expected = model.generate(**inputs, do_sample=False, max_new_tokens=11)
    model.generation_config.max_new_tokens = 11
    cache = run_block("docs/usage.md", 5, model=model, inputs=inputs)["cache"]
    assert cache.get_seq_length() == 19 and not cache.is_recording_past(0)
    cache.pool.check()
    for num_right in (0, 2, 4):
        candidates = expected[:, 8:13].clone()
        candidates[:, 1 + num_right :] = 255
        with torch_uma.CachePool(model, memory="4MiB") as pool:
            sequence = pool.add()
            with torch.no_grad(), pool.step({sequence: 8}) as cache:
                model(expected[:, :8], cache=cache, **cache.inputs())
            given = {"model": model, "pool": pool, "sequence": sequence, "candidates": candidates}
            given = run_block("docs/usage.md", 6, **given)
            assert torch.equal(given["tokens"], expected[:, 9 : 10 + num_right])
            assert given["sequence"].length == 9 + num_right
            pool.check()
            given["sequence"].free()
            pool.check()
            assert not any(subpool.live_pages for subpool in pool.stats().subpools)


def test_the_readme_makes_a_pool_without_a_model_library():
    pool = run_block("README.md", 4)["pool"]
    assert isinstance(pool, torch_uma.CachePool)
    assert [subpool.name for subpool in pool.plan.subpools] == ["state", "window_128", "full"]


def test_the_simulation_of_its_page_runs(capsys):
    report = run_block("docs/simulate.md", config=build("gpt_oss").config, memory="4MiB")["report"]
    assert report.num_completed == 100 and capsys.readouterr().out.startswith(f"{report.new_tokens_per_s} ")


@pytest.mark.parametrize("name", BUILDERS)
def test_what_the_serving_page_does_with_a_list_of_prompts(name, capsys):
    model, words = build(name, attention="eager"), tokenizer()
    texts = ["Who is there?", "It is me.", "Well"]
    given = {"model": model, "tokenizer": words, "texts": texts, "memory": "2MiB"}
    for generation in run_block("docs/serving.md", 0, **given)["generations"]:
        alone = model.generate(torch.tensor([generation.prompt]), do_sample=False, max_new_tokens=20)
        assert [*generation.prompt, *generation.tokens] == alone[0].tolist()
    chats = [[{"role": "user", "content": text}] for text in texts]
    asked = words.apply_chat_template(chats, add_generation_prompt=True, return_dict=True)
    assert len(torch_uma.generate_batch(model, asked, memory="2MiB", max_new_tokens=2)) == 3
    capsys.readouterr()
    prompts = [words(text).input_ids for text in texts]
    short, long = run_block("docs/serving.md", 1, prompts=prompts, **given)["generations"]
    assert (len(short.tokens), len(long.tokens)) == (10, 20)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 30 and lines.count(f"{short.prompt[:3]} has ended: length") == 1


def test_what_the_serving_page_does_as_prompts_come(capsys):
    words = tokenizer()
    asked = {"model": build("qwen3_next"), "memory": "2MiB", "prompts": [[1, 2, 3], [4, 5, 6, 7]]}
    unwanted = run_block("docs/serving.md", 2, **asked)["unwanted"]
    assert (len(unwanted.tokens), unwanted.finish_reason) == (5, "cancelled")
    assert "first [" in capsys.readouterr().out
    given = run_block("docs/serving.md", 3)
    options = {"memory": "2MiB", "page_size": 4}
    thread = threading.Thread(target=given["drive"], args=(asked["model"], given["calls"]), kwargs=options)
    thread.start()
    cancelled = []

    async def told(text, most):
        tokens = []
        stream = given["stream"](given["calls"], words(text).input_ids, max_new_tokens=12)
        async for token in stream:
            tokens.append(token)
            if len(tokens) == most:
                break
        await stream.aclose()
        return tokens

    async def serve():
        answers = await asyncio.gather(told("Who?", 12), told("Me.", 3), told("Well", 12))
        with pytest.raises(torch_uma.OutOfMemory, match="longer than"):
            await told("long" * 9999, 1)
        given["calls"].put(lambda loop: cancelled.append(loop.scheduler.stats().cancelled))
        return answers

    try:
        answers = asyncio.run(serve())
    finally:
        given["calls"].put(None)
        thread.join()
    for text, answer, number in zip(("Who?", "Me.", "Well"), answers, (12, 3, 12)):
        alone = torch_uma.generate_batch(asked["model"], words([text]), max_new_tokens=number, memory="2MiB")[0]
        assert answer == alone.tokens
    assert cancelled in ([0], [1])  # whether the step that gave the last tokens was faster


def test_what_the_serving_page_asks_of_memory(capsys):
    given = run_block("docs/serving.md", 5, model=build("gpt_oss"), memory="1MiB")
    assert given["need"] and set(given["need"].bytes) == {"window_24", "full"}
    assert "70 tokens need" in capsys.readouterr().out


@pytest.mark.parametrize("name", BUILDERS)
def test_the_loop_of_the_serving_page_is_a_whole_one(name):
    model = build(name, attention="eager")
    asked = [prompts((length,), seed=length)["input_ids"] for length in (5, 17, 40, 3, 5, 9)]
    given = {"model": model, "prompts": [each[0].tolist() for each in asked], "end_token": 7}
    given = run_block("docs/serving.md", 4, memory="80KiB" if name == "gpt_oss" else "160KiB", **given)
    assert not any(subpool.live_pages for subpool in given["pool"].stats().subpools)
    for prompt, text in zip(asked, given["texts"].values(), strict=True):
        alone = model.generate(prompt, do_sample=False, max_new_tokens=20, eos_token_id=7)
        assert text == alone[0].tolist()
