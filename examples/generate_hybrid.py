"""Generate with the default cache and with one arena for every kind of memory, and show what the arena held.

python examples/generate_hybrid.py                          # three tiny hybrids, prompts cut from alice.txt
python examples/generate_hybrid.py --model PATH_OR_ID       # a real checkpoint with its tokenizer
python examples/generate_hybrid.py --model PATH_OR_ID --quality --text FILE     # log-probabilities over a text

Needs rich: pip install '.[examples]'.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tiny_models import BUILDERS, build
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList, PreTrainedModel

import torch_uma
from torch_uma import CachePool, OutOfMemory, UnifiedCache

try:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table
    from rich.text import Text
except ModuleNotFoundError:
    sys.exit("this example draws with rich, which the extra 'examples' brings: pip install '.[examples]'")

HERE = Path(__file__).parent
COLOURS = ["green", "yellow", "magenta", "red", "cyan", "blue"]
TIE_MARGIN = 1e-4
console = Console()
Inputs = dict[str, torch.Tensor]


class Watch(LogitsProcessor):
    """Is called between steps: moves the progress bar on and notes the bytes that each kind holds."""

    def __init__(self, progress: Progress, label: str, num_steps: int, cache: UnifiedCache | None = None) -> None:
        self.progress, self.cache = progress, cache
        self.task = progress.add_task(label, total=num_steps)
        self.live_bytes: list[dict[str, int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.progress.advance(self.task)
        if self.cache is not None:
            self.live_bytes.append({kind.name: kind.live_bytes for kind in self.cache.pool.stats().subpools})
        return scores


def tiny_models() -> list[tuple[str, PreTrainedModel]]:
    """Full + window with sinks, gated DeltaNet + full, Mamba-2 + full: those of the tests, without training."""
    return [(name, build(name, attention="eager" if name == "gpt_oss" else "sdpa")) for name in BUILDERS]


def pad_left(pieces: list[list[int]], pad: int, device: torch.device) -> Inputs:
    width = max(map(len, pieces))
    return {
        "input_ids": torch.tensor([[pad] * (width - len(piece)) + piece for piece in pieces], device=device),
        "attention_mask": torch.tensor(
            [[0] * (width - len(piece)) + [1] * len(piece) for piece in pieces], device=device
        ),
    }


def cut(tokens: list[int], num_pieces: int) -> list[list[int]]:
    """Consecutive pieces, each longer than the one before."""
    unit = max(1, len(tokens) // (num_pieces * (num_pieces + 1) // 2))
    starts = [unit * i * (i + 1) // 2 for i in range(num_pieces + 1)]
    return [tokens[start:end] for start, end in zip(starts, starts[1:])]


def compare_tokens(model: PreTrainedModel, inputs: Inputs, ours: torch.Tensor, default: torch.Tensor) -> str:
    """Says whether the tokens are identical; a difference is a tie if the model in fp64 cannot tell the two apart."""
    verdict = "identical"
    for row in range(len(ours)):
        differences = (ours[row] != default[row]).nonzero()
        if not len(differences):
            continue
        at, first = int(differences[0]), int(inputs["attention_mask"][row].argmax())
        exact = copy.deepcopy(model).double()
        if exact._can_set_experts_implementation():
            exact.set_experts_implementation("eager")  # the grouped product has no fp64
        top = exact.eval()(default[row : row + 1, first:at], use_cache=False).logits[0, -1].topk(2).values
        if top[0] - top[1] >= TIE_MARGIN:
            return f"DIFFERENT: row {row} at token {at}, margin {float(top[0] - top[1]):.2e}"
        verdict = "identical up to a tie of two tokens"
    return verdict


def show_bytes(live_bytes: list[dict[str, int]]) -> None:
    """A line for each kind: the bytes that its pages hold, step by step."""
    table = Table("bytes of", "first step", "last step", "most", "over the steps", box=None)
    for kind, colour in zip(live_bytes[0], COLOURS):
        values = np.array([live[kind] for live in live_bytes])
        samples = values[np.linspace(0, len(values) - 1, min(32, len(values))).astype(int)]
        bars = "".join("▁▂▃▄▅▆▇█"[int(7 * value / values.max())] for value in samples)
        table.add_row(Text(kind, colour), f"{values[0]:,}", f"{values[-1]:,}", f"{values.max():,}", Text(bars, colour))
    console.print(table)


def show_arena(pool: CachePool, width: int = 64) -> None:
    """The arena from its low end to its high end, a cell for each 1/`width`: who holds most of it."""
    plan, allocator = pool.plan, pool.allocator
    held = np.zeros((len(plan.subpools) + 1, width))  # the last is the sink
    held[-1] = covered(0, plan.sink_bytes, plan.arena_bytes, width)
    for index, kind in enumerate(plan.subpools):
        pages = allocator.v2p[allocator.id_base[index] + kind.first_page : allocator.id_base[index + 1]]
        for page in pages[pages >= 0]:
            start = kind.origin_bytes + int(page) * kind.page_bytes
            held[index] += covered(start, start + kind.page_bytes, plan.arena_bytes, width)
    line = Text("  ")
    for cell in range(width):
        owner = int(held[:, cell].argmax())
        if held[owner, cell] == 0:
            line.append("·", "dim")
        else:
            line.append(
                "█" if owner < len(plan.subpools) else "▒", COLOURS[owner] if owner < len(plan.subpools) else "dim"
            )
    for kind, colour in zip(plan.subpools, COLOURS):
        line.append(f"  {kind.name}", colour)
    console.print(line, soft_wrap=True)


def covered(start_bytes: int, end_bytes: int, arena_bytes: int, width: int) -> Any:
    """Bytes of each cell that lie in the range."""
    edges = np.linspace(0, arena_bytes, width + 1)
    return np.clip(np.minimum(edges[1:], end_bytes) - np.maximum(edges[:-1], start_bytes), 0, None)


def num_resident(pool: CachePool, num_tokens: int) -> int:
    """How many requests of this length the pool holds at once."""
    count = 0
    try:
        while True:
            pool.add(num_tokens)
            count += 1
    except OutOfMemory:
        pool.close()
        return count


def show_capacity(model: PreTrainedModel, max_tokens: int) -> None:
    """Requests that fit into one budget: the arena, and two fixed pools at several splits."""
    plan = torch_uma.plan(model, memory="1GiB", num_tokens=max_tokens)
    if len(plan.subpools) < 2:
        console.print(f"one kind of memory only ({plan.subpools[0].name}): there is nothing to split")
        return
    memory = 40 * plan.bytes_per_sequence(max_tokens) + 4 * plan.sink_bytes
    low, high = plan.subpools[0].name, plan.subpools[-1].name
    shares = (0.1, 0.3, 0.5, 0.7)
    table = Table("tokens each", "one arena", *(f"split {share:.0%}" for share in shares), box=None)
    for num_tokens in (max_tokens // 16, max_tokens // 4, max_tokens):
        counts = [num_resident(CachePool(model, memory=memory, max_sequences=1024), num_tokens)]
        for share in shares:
            split = {low: share, high: 1 - share}
            counts.append(num_resident(CachePool(model, memory=memory, max_sequences=1024, split=split), num_tokens))
        table.add_row(str(num_tokens), *map(str, counts))
    console.print(f"requests that fit into {memory:,} bytes; split: fixed pools instead, that share for {low!r}")
    console.print(table)


def run(name: str, model: Any, waves: dict[str, Inputs], num_new_tokens: int) -> bool:
    """Generates every wave of requests twice, ours in one arena that serves all of them; whether the tokens agree."""
    console.rule(name)
    plan = torch_uma.plan(model, memory="1TiB")
    widths = {wave: inputs["input_ids"].shape[1] + num_new_tokens for wave, inputs in waves.items()}
    wave_bytes = [len(waves[wave]["input_ids"]) * plan.bytes_per_sequence(width) for wave, width in widths.items()]
    pool = CachePool(model, memory=int(1.1 * max(wave_bytes)) + 4 * plan.sink_bytes)
    options = {"max_new_tokens": num_new_tokens, "min_new_tokens": num_new_tokens, "do_sample": False}
    live_bytes: list[dict[str, int]] = []
    verdicts = []
    for wave, inputs in waves.items():
        cache = UnifiedCache(model, pool=pool, max_tokens=widths[wave])
        runs, seconds = [], []
        with Progress(console=console, transient=True) as progress:
            for label, kwargs in (("default cache", {}), ("one arena", {"cache": cache})):
                watch = Watch(progress, f"{wave}, {label}", num_new_tokens, kwargs.get("cache"))
                started = time.perf_counter()
                processors = LogitsProcessorList([watch])
                runs.append(model.generate(**inputs, **options, **kwargs, logits_processor=processors))
                seconds.append(time.perf_counter() - started)
        verdicts.append(compare_tokens(model, inputs, runs[1], runs[0]))
        lengths = inputs["attention_mask"].sum(1).tolist()
        console.print(
            f"{wave}: {len(lengths)} prompts of {min(lengths)} to {max(lengths)} tokens, {num_new_tokens} new"
        )
        console.print(
            f"  tokens [bold]{verdicts[-1]}[/bold], {seconds[0]:.2f} s by default, {seconds[1]:.2f} s in the arena"
        )
        console.print("  layers served by", ", ".join(cache.paths()))
        show_arena(pool)
        live_bytes += watch.live_bytes
        pool.check()
        cache.reset()
    show_bytes(live_bytes)
    show_capacity(model, max(widths.values()))
    return not any(verdict.startswith("DIFFERENT") for verdict in verdicts)


@torch.no_grad()
def show_quality(model: PreTrainedModel, tokens: list[int], chunk: int = 64) -> bool:
    """Log-probabilities of a text, read in chunks, with either cache; whether they agree to 1e-3."""
    ids = torch.tensor([tokens], device=model.device)
    results = []
    with Progress(console=console, transient=True) as progress:
        for label in ("default cache", "one arena"):
            task = progress.add_task(label, total=len(tokens))
            kwargs: dict[str, Any] = {"use_cache": True}
            if label == "one arena":
                kwargs["cache"] = UnifiedCache(model, max_tokens=len(tokens))
            scores, last = [], None
            for part in ids.split(chunk, dim=1):
                output = model(part, **kwargs)
                kwargs["cache"] = output.cache
                logits = output.logits if last is None else torch.cat([last, output.logits], dim=1)
                targets = part[:, 1:] if last is None else part
                log_probabilities = logits[:, :-1].float().log_softmax(-1)
                scores.append(log_probabilities.gather(2, targets.unsqueeze(2)).squeeze(2))
                last = output.logits[:, -1:]
                progress.advance(task, part.shape[1])
            results.append(torch.cat(scores, dim=1))
    means = [float(result.mean()) for result in results]
    difference = float((results[0] - results[1]).abs().max())
    console.print(
        f"mean log-probability of {len(tokens)} tokens: {means[0]:.6f} with the default cache, {means[1]:.6f} "
        f"with one arena; largest difference of a token {difference:.1e}"
    )
    return difference < 1e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint with its tokenizer; without it, three tiny models on bytes")
    parser.add_argument("--text", type=Path, default=HERE / "alice.txt", help="a text file to cut prompts from")
    parser.add_argument("--quality", action="store_true", help="compare log-probabilities over the text as well")
    parser.add_argument(
        "--prompts", type=int, default=4, help="prompts of the smaller wave; the other has four times as many"
    )
    parser.add_argument("--new-tokens", type=int, default=120, help="tokens that each prompt is answered with")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()  # it names each kernel that has only its plain torch version here
    if not arguments.text.is_file():
        parser.error(f"--text {arguments.text} is no file")
    if min(arguments.prompts, arguments.new_tokens) < 1:
        parser.error("--prompts and --new-tokens are at least 1")
    text = arguments.text.read_text()
    if arguments.model is None:
        torch.set_num_threads(1)  # matrices this small only lose by being split
        models, tokens, pad = tiny_models(), list(text.encode()), 256
    else:
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        models = [(arguments.model, AutoModelForCausalLM.from_pretrained(arguments.model, dtype="auto").eval())]
        tokens = tokenizer(text).input_ids
        pad = next((token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None), 0)
    if len(tokens) < 4 * (4 * arguments.prompts) ** 2:
        parser.error(f"--text has {len(tokens)} tokens, too few for so many prompts of unequal length")
    agree = True
    for name, model in models:
        model.to(arguments.device)
        waves = {
            "many short": pad_left(cut(tokens[:600], 4 * arguments.prompts), pad, model.device),
            "few long": pad_left(cut(tokens[600:2400], arguments.prompts), pad, model.device),
        }
        agree &= run(name, model, waves, arguments.new_tokens)
        if arguments.quality:
            agree &= show_quality(model, tokens)
    sys.exit(0 if agree else 1)


if __name__ == "__main__":
    main()
