"""`attend` against plain fp64 attention over a dict of positions, which knows no pages, by both of its ways."""

import importlib
import math
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from torch_uma.ops import attention, blocks, dtype_name, pieces, reads, reference
from torch_uma.ops.attend import attend, attend_reads, attend_run, plan_reads
from torch_uma.ops.attend_gathered import attend_gathered
from torch_uma.ops.attend_pieces import attend_pieces, is_served

op = torch.ops.torch_uma.attend
host = importlib.import_module("torch_uma.ops.attend_reads")  # the package has functions of these names, too
gathered = importlib.import_module("torch_uma.ops.attend_gathered")

CASES = 60
SEEDS = 50

# Largest error, of values and scores of about 1. One rounding of a result of up to 4 is 2^-9 x 4 in bfloat16 and
# 2^-12 x 4 in float16; results of several runs are rounded once each and once more when merged, and the kernel rounds
# the weights of the softmax to the dtype, too, which makes four roundings. In float32, sums of some hundred numbers.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}


@dataclass
class World:
    """Sequences whose pages lie at random in an arena of NaN, and what they hold by position."""

    chance: random.Random
    page_size: int
    num_kv_heads: int
    dims: tuple[int, int]
    dtypes: tuple[torch.dtype, torch.dtype]
    lengths: list[int]
    num_new: list[int]
    keep_new: list[bool]  # of each sequence, whether the arena has its new tokens
    first_live: list[int]  # positions before are in no page, or in memory that is NaN
    spread: float = 0.5  # how often a page does not follow the one before
    overlap: bool = False
    given: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.chance.randrange(2**40))
        sizes = [self.num_kv_heads * dim * dtype.itemsize for dim, dtype in zip(self.dims, self.dtypes)]
        key_at = 16 * self.chance.randrange(3)
        value_at = key_at if self.overlap else (key_at + sizes[0] + 15) // 16 * 16 + 16 * self.chance.randrange(2)
        self.offsets_bytes = [key_at, value_at]
        end = max(key_at + sizes[0], value_at + sizes[1])
        self.entry_bytes = (end + 15) // 16 * 16 + 16 * self.chance.randrange(3)
        self.columns = max(-(-length // self.page_size) for length in self.lengths) + self.chance.randrange(3)
        self.rows = self.chance.sample(range(len(self.lengths) + 2), len(self.lengths))
        self.needed = [self._columns_of(i) for i in range(len(self.lengths))]
        num_pages = sum(len(columns) for columns in self.needed)
        self.num_places = 2 * num_pages + 3
        self.origin_bytes = 16 * self.chance.randrange(4)
        tail = 16 * self.chance.randrange(2)
        self.arena = torch.empty(self.origin_bytes + self.num_places * self.page_size * self.entry_bytes + tail).to(
            torch.uint8
        )
        self.content: list[dict[int, tuple[torch.Tensor, torch.Tensor]]] = []
        for i, length in enumerate(self.lengths):
            self.content.append({p: self._token() for p in range(self.first_live[i], length)})
        self.ids = self.chance.sample(range(num_pages + 4), num_pages)
        self.lay_out()

    def _columns_of(self, i: int) -> range:
        stored = self.lengths[i] - (0 if self.keep_new[i] else self.num_new[i])
        return range(min(self.first_live[i], stored) // self.page_size, -(-stored // self.page_size))

    def _token(self) -> tuple[torch.Tensor, torch.Tensor]:
        key = torch.randn(self.num_kv_heads, self.dims[0], generator=self.generator)
        key = key.to(self.dtypes[0])
        if self.overlap:
            return key, key[:, : self.dims[1]]
        value = torch.randn(self.num_kv_heads, self.dims[1], generator=self.generator)
        return key, value.to(self.dtypes[1])

    def places(self) -> list[int]:
        """Pages of all sequences: some follow one another, some do not."""
        num_pages = sum(len(columns) for columns in self.needed)
        pieces: list[int] = []
        for _ in range(num_pages):
            if pieces and self.chance.random() > self.spread:
                pieces[-1] += 1
            else:
                pieces.append(1)
        order = list(range(len(pieces)))
        self.chance.shuffle(order)
        gaps = self.num_places - num_pages
        first: dict[int, int] = {}
        at = 0
        for piece in order:
            gap = self.chance.randrange(gaps + 1) if self.chance.random() < 0.3 else 0
            gaps -= gap
            at += gap
            first[piece] = at
            at += pieces[piece]
        return [first[piece] + page for piece, size in enumerate(pieces) for page in range(size)]

    def lay_out(self) -> None:
        """Put every page at a new place; all else is NaN."""
        self.arena.fill_(0xFF)
        self.page_table = torch.full((len(self.lengths) + 2, self.columns), -1, dtype=torch.int32)
        self.v2p = torch.full((len(self.ids) + 4,), -1, dtype=torch.int32)
        places = iter(self.places())
        ids = iter(self.ids)
        for i, row in enumerate(self.rows):
            if row < 0:
                continue
            for column in self.needed[i]:
                page = next(ids)
                self.page_table[row, column] = page
                self.v2p[page] = next(places)
            stored = self.lengths[i] - (0 if self.keep_new[i] else self.num_new[i])
            for position, (key, value) in self.content[i].items():
                if position < stored:
                    column, inside = divmod(position, self.page_size)
                    entry = int(self.v2p[self.page_table[row, column]]) * self.page_size + inside
                    for offset_bytes, numbers in zip(self.offsets_bytes, (key, value)):
                        at = self.origin_bytes + entry * self.entry_bytes + offset_bytes
                        self.arena[at : at + numbers.numel() * numbers.element_size()] = (
                            numbers.reshape(-1).contiguous().view(torch.uint8)
                        )

    def layout(self) -> tuple[Any, ...]:
        names = [dtype_name(dtype) for dtype in self.dtypes]
        return self.origin_bytes, self.entry_bytes, self.offsets_bytes, list(self.dims), self.num_kv_heads, names

    def tables(self) -> tuple[torch.Tensor, ...]:
        starts = np.concatenate([[0], np.cumsum(self.num_new)])
        return (
            torch.from_numpy(starts),
            self.page_table,
            self.v2p,
            torch.tensor(self.rows),
            torch.tensor(self.lengths),
        )

    def new(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the new tokens, packed; NaN for those that nothing sees."""
        unseen = tuple(torch.full((self.num_kv_heads, dim), math.nan).to(t) for dim, t in zip(self.dims, self.dtypes))
        tokens = [self.content[i].get(p, unseen) for i, p in self.queries()]
        return torch.stack([key for key, _ in tokens]), torch.stack([value for _, value in tokens])

    def queries(self) -> list[tuple[int, int]]:
        """Sequence and position of each query."""
        return [
            (i, position)
            for i, (length, count) in enumerate(zip(self.lengths, self.num_new))
            for position in range(length - count, length)
        ]


def oracle(
    world: World, query: torch.Tensor, scale: float, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense attention in fp64, one query and one head at a time."""
    num_heads = query.shape[1]
    group = num_heads // world.num_kv_heads
    window, chunk, softcap = (options.get(name, 0) for name in ("window", "chunk", "softcap"))
    starts, sinks, mask, bias = (options.get(name) for name in ("starts", "sinks", "mask", "bias"))
    indices, first_column = options.get("indices"), options.get("first_column", 0)
    out = torch.zeros(*query.shape[:2], world.dims[1], dtype=torch.float64)
    lse = torch.full(query.shape[:2], -math.inf, dtype=torch.float64)
    for token, (i, position) in enumerate(world.queries()):
        place = position - (world.lengths[i] - world.num_new[i])
        allowed = range(position + 1) if indices is None else sorted(p for p in indices[token].tolist() if p >= 0)
        seen = [
            p
            for p in allowed
            if p <= position
            and (not window or position - p < window)
            and (not chunk or p // chunk == position // chunk)
            and (starts is None or p >= starts[i])
            and (mask is None or at(mask.unsqueeze(1), i, place, p - first_column)[0])
        ]
        if world.rows[i] < 0:
            seen = []
        logits = torch.empty(num_heads, 0, dtype=torch.float64)
        if seen:
            keys, values = (torch.stack([world.content[i][p][which] for p in seen]).double() for which in (0, 1))
            keys, values = (each.repeat_interleave(group, 1) for each in (keys, values))
            logits = torch.einsum("hd,nhd->hn", query[token].double(), keys) * scale
            if softcap:
                logits = torch.tanh(logits / softcap) * softcap
            if bias is not None:
                logits = logits + torch.stack([at(bias, i, place, p - first_column) for p in seen], -1).double()
        if sinks is not None:
            logits = torch.cat([logits, sinks.double().unsqueeze(1)], 1)
        if logits.shape[1]:
            lse[token] = logits.logsumexp(1)
        if seen:
            weights = torch.softmax(logits, 1)[:, : len(seen)]
            out[token] = torch.einsum("hn,nhd->hd", weights, values)
    return out, lse


def at(columns: torch.Tensor, sequence: int, place: int, column: int) -> torch.Tensor:
    """What mask or bias have there, for each head."""
    return columns[min(sequence, columns.shape[0] - 1), :, min(place, columns.shape[2] - 1), column]


@dataclass
class Case:
    """A world, a query and options, all at random."""

    world: World
    query: torch.Tensor
    scale: float
    options: dict[str, Any]

    def arguments(self) -> tuple[Any, ...]:
        world = self.world
        origin_bytes, entry_bytes, *layout = world.layout()
        return (
            *(world.arena, self.query, *world.tables()),
            *(origin_bytes, entry_bytes, world.page_size, *layout, self.scale),
        )


def random_case(chance: random.Random) -> Case:
    """Every feature, present or not, by chance."""

    def sometimes(share: float) -> bool:
        return chance.random() < share

    page_size = chance.choice([1, 7, 16, 64])
    num_kv_heads, group = chance.choice([(1, 1), (1, 4), (2, 1), (2, 3), (3, 2)])
    dim = chance.choice([8, 16, 24])
    dims = (dim, dim if sometimes(0.6) else chance.choice([4, 8, 12, 20, 32]))
    dtype = chance.choice([torch.float32, torch.float32, torch.float16, torch.bfloat16, torch.float64])
    stored = (dtype, dtype)
    if sometimes(0.2):
        stored = tuple(chance.choice([torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]) for _ in "kv")
    overlap = sometimes(0.15)
    if overlap:
        num_kv_heads, group = 1, chance.choice([2, 6])
        dims, stored = (24, chance.choice([8, 16, 24])), (stored[0], stored[0])
    num_sequences = chance.randrange(1, 5)
    most = chance.choice([6, 40, 40 * page_size if page_size < 8 else 90])
    alike = sometimes(0.6)
    lengths = [chance.randrange(1, most + 1) for _ in range(num_sequences)]
    num_new = [1] * num_sequences if sometimes(0.4) else [chance.randrange(0, length + 1) for length in lengths]
    if alike:
        num_new = [min(num_new[0], min(lengths))] * num_sequences
        lengths = lengths if sometimes(0.5) else [max(lengths)] * num_sequences
    if not sum(num_new):
        num_new = [1] * num_sequences
    options: dict[str, Any] = {}
    firsts = [length - count for length, count in zip(lengths, num_new)]
    low = [0] * num_sequences
    if sometimes(0.35):
        options["window"] = chance.choice([1, 2, 5, 16, 33, 200])
    if sometimes(0.2):
        options["chunk"] = chance.choice([1, 3, 8, 50])
    if sometimes(0.25):
        starts = [chance.randrange(length + (chance.random() < 0.1)) for length in lengths]
        starts = starts if sometimes(0.5) else [min(starts)] * num_sequences
        options["starts"] = torch.tensor(starts)
        low = starts
    if "window" in options:
        low = [max(a, first - options["window"] + 1) for a, first in zip(low, firsts)]
    if "chunk" in options:
        low = [max(a, first // options["chunk"] * options["chunk"]) for a, first in zip(low, firsts)]
    has_new = sometimes(0.35)
    world = World(
        chance=chance,
        page_size=page_size,
        num_kv_heads=num_kv_heads,
        dims=dims,
        dtypes=stored,
        lengths=lengths,
        num_new=num_new,
        keep_new=[not has_new or sometimes(0.5) for _ in lengths],
        first_live=[min(a, length) for a, length in zip(low, lengths)],
        spread=chance.choice([0.0, 0.1, 0.5, 1.0]),
        overlap=overlap,
    )
    if sometimes(0.3):
        world.lay_out()
    num_tokens, num_heads = sum(num_new), num_kv_heads * group
    generator = world.generator

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    if sometimes(0.3):
        query = normal(num_heads, num_tokens, dims[0]).to(dtype).transpose(0, 1)
    else:
        query = normal(num_tokens, num_heads, dims[0]).to(dtype)
    if sometimes(0.25):
        options["softcap"] = chance.choice([0.5, 3.0])
    if sometimes(0.3):
        options["sinks"] = normal(num_heads).to(dtype)
    if has_new:
        options["new_key"], options["new_value"] = world.new()
        if sometimes(0.3):
            options["new_key"] = options["new_key"].transpose(0, 1).contiguous().transpose(0, 1)
    if len(set(num_new)) == 1:
        first_column = max(0, min(low) - chance.randrange(3))
        num_columns = max(1, max(lengths) - first_column + chance.randrange(2))
        shape = [chance.choice([1, num_sequences]), 1, chance.choice([1, num_new[0]]), num_columns]
        if sometimes(0.25):
            options["mask"] = torch.rand(shape[0], *shape[2:], generator=generator) < chance.choice([0.1, 0.6, 0.95])
        if sometimes(0.2):
            shape[1] = chance.choice([1, num_heads])
            shape[0] = chance.choice([1, num_sequences])
            options["bias"] = normal(*shape).to(chance.choice([dtype, torch.float32]))
        if "mask" in options or "bias" in options:
            options["first_column"] = first_column
    if sometimes(0.15):
        chosen = [chance.sample(range(p + 3), min(5, p + 3)) for _, p in world.queries()]
        lows = [low[i] for i, _ in world.queries()]
        chosen = [[p if chance.random() < 0.8 else -1 for p in line] + [-1] * (5 - len(line)) for line in chosen]
        if "mask" in options or "bias" in options:
            chosen = [[p if p >= a else -1 for p in line] for line, a in zip(chosen, lows)]
        options["indices"] = torch.tensor(chosen)
    if sometimes(0.05):
        world.rows[chance.randrange(num_sequences)] = -1
    return Case(world, query, dims[0] ** -0.5, options)


def check(
    got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor], case: Case, what: str
) -> None:
    tolerance = TOLERANCE[case.query.dtype]
    wide = torch.float64 if case.query.dtype == torch.float64 else torch.float32
    assert got[0].dtype == case.query.dtype and got[1].dtype == wide, what
    for result, expected in zip(got, want, strict=True):
        assert result.shape == expected.shape, what
        result = result.double()
        assert torch.equal(result == -math.inf, expected == -math.inf), what
        finite = expected != -math.inf
        error = (result - expected)[finite].abs().max().item() if finite.any() else 0.0
        assert error <= tolerance, f"{what}: off by {error}"  # also if it is NaN


def at_any_size(chance: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that only weigh costs become small by chance, so that small cases take every path."""
    most_packed = chance.choice([1, 3, 16])
    monkeypatch.setattr(blocks, "MOST_PACKED", most_packed)
    monkeypatch.setattr(host, "MOST_PACKED", most_packed)
    monkeypatch.setattr(host, "_FEW_TOKENS", chance.choice([1, 256]))
    monkeypatch.setattr(blocks, "_BLOCK_TOKENS", chance.choice([4, 30, 512]))
    monkeypatch.setattr(blocks, "_WINDOW_BLOCK_TOKENS", chance.choice([1, 7, 128]))
    monkeypatch.setattr(blocks, "_SHORT_RUN_BYTES", chance.choice([1, 1000, 5000, 2**16]))
    monkeypatch.setattr(blocks, "_MORE_SHORT", chance.choice([1, 4]))
    monkeypatch.setattr(blocks, "_COPY_BYTES", chance.choice([500, 2**20]))
    monkeypatch.setattr(attention, "_MOST_SCORES", chance.choice([1, 200, 2**20]))
    monkeypatch.setattr(attention, "_MOST_NUMBERS", chance.choice([1, 3000, 2**22]))
    monkeypatch.setattr(attention, "_FEW_NUMBERS", chance.choice([0, 2**17]))
    monkeypatch.setattr(attention, "_FEWEST_KEYS", chance.choice([1, 5, 256]))
    monkeypatch.setattr(gathered, "_MOST_GATHERED", chance.choice([1, 3000, 2**24]))
    monkeypatch.setattr(pieces, "_SHORT_BYTES", chance.choice([1, 300, 2000, 2**20]))
    monkeypatch.setattr(pieces, "_PIECE_TOKENS", chance.choice([1, 3, 20, 512]))
    reads.answer.cache_clear()
    if chance.random() < 0.3:  # as where there was no compiler
        monkeypatch.setattr(host, "is_served", lambda dtype: False)
    else:
        monkeypatch.setattr(host, "is_served", is_served)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_cases(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(CASES):
        chance = random.Random(f"{seed} {number}")
        case = random_case(chance)
        at_any_size(chance, monkeypatch)
        what = f"seed {seed} case {number} {sorted(case.options)}"
        want = oracle(case.world, case.query, case.scale, case.options)
        check(op(*case.arguments(), **case.options), want, case, f"{what} op")
        if number % 3 == 0:
            check(attend_gathered(*case.arguments(), **case.options), want, case, f"{what} gathered")
        if number % 5 == 0:
            case.world.lay_out()
            check(op(*case.arguments(), **case.options), want, case, f"{what} moved")


@pytest.mark.skipif(not is_served(torch.float32), reason="the package was installed without a C compiler")
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_single_queries_read_pieces(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of unequal length, some without a query, in many runs or few, that go to the loop in C."""
    calls = []

    def spy(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(arguments)
        return attend_pieces(*arguments)

    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for number in range(60):
            chance = random.Random(f"pieces {number}")
            at_any_size(chance, monkeypatch)
            monkeypatch.setattr(host, "attend_pieces", spy)
            monkeypatch.setattr(host, "is_served", is_served)
            lengths = [chance.randrange(1, chance.choice([4, 300])) for _ in range(chance.randrange(2, 7))]
            num_new = [int(chance.random() < 0.8) for _ in lengths]
            num_new[0] = 1
            dtype = chance.choice([torch.float32, torch.float16, torch.bfloat16])
            options: dict[str, Any] = {"window": chance.choice([1, 9, 100])} if chance.random() < 0.5 else {}
            window = options.get("window", 1000)
            world = World(
                chance=chance,
                page_size=chance.choice([1, 7, 16]),
                num_kv_heads=2,
                dims=(16, 16),
                dtypes=(dtype, dtype),
                lengths=lengths,
                num_new=num_new,
                keep_new=[True] * len(lengths),
                first_live=[max(0, length - window) for length in lengths],
                spread=chance.choice([0.0, 0.1, 1.0]),
            )
            if chance.random() < 0.5:
                options["sinks"] = torch.randn(6, generator=world.generator).to(dtype)
            query = torch.randn(sum(num_new) + 2, 6, 16, generator=world.generator).to(dtype)[: sum(num_new)]
            case = Case(world, query, 0.25, options)
            for moved in (False, True):
                want = oracle(world, query, case.scale, options)
                check(op(*case.arguments(), **options), want, case, f"pieces {number} moved {moved}")
                world.lay_out()
    finally:
        torch.set_num_threads(before)
    assert len(calls) > 80


def plain_case(seed: int, length: int, num_new: int, dtype: torch.dtype = torch.float32, **world: Any) -> Case:
    """One sequence of grouped queries, without options."""
    given = {"page_size": 16, "num_kv_heads": 2, "dims": (8, 8), "spread": 0.1} | world
    made = World(
        chance=random.Random(seed),
        dtypes=(dtype, dtype),
        lengths=[length],
        num_new=[num_new],
        keep_new=[True],
        first_live=[0],
        **given,
    )
    query = torch.randn(num_new, 4, given["dims"][0], generator=made.generator).to(dtype)
    return Case(made, query, 0.3, {})


@pytest.mark.parametrize("way", [op, attend_gathered], ids=["op", "gathered"])
@pytest.mark.parametrize("num_runs", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("num_new", [1, 5, 150])
def test_number_of_runs(num_runs: int, num_new: int, way: Any) -> None:
    case = plain_case(num_runs, 400, num_new, page_size=10)
    world = case.world
    pages = list(range(40))
    bounds = [0, *sorted(world.chance.sample(range(1, 40), num_runs - 1)), 40]
    pieces = [pages[a:b] for a, b in zip(bounds, bounds[1:])]
    world.chance.shuffle(pieces)
    places = {page: 2 * i + place for i, piece in enumerate(pieces) for place, page in zip(range(1000), piece)}
    first = 0
    for piece in pieces:
        for page in piece:
            places[page] = first
            first += 1
        first += 1
    world.places = lambda: [places[page] for page in pages]  # type: ignore[method-assign]
    world.lay_out()
    for options in ({}, {"window": 130}, {"softcap": 1.0}, {"mask": torch.rand(1, num_new, 400) < 0.8}):
        want = oracle(world, case.query, case.scale, options)
        check(way(*case.arguments(), **options), want, case, f"{num_runs} runs {sorted(options)}")


def test_one_plan_serves_every_layer() -> None:
    """Key and value change places for the second layer, which reads by the same plan, and masks that it kept."""
    case = plain_case(1, 300, 200)
    world = case.world
    query_starts, page_table, v2p, rows, lengths = (each.numpy() for each in world.tables())
    plan = plan_reads(page_table, v2p, rows, lengths, query_starts, world.page_size, window=60)
    for _ in range(2):
        got = attend_reads(world.arena, case.query, plan, *world.layout(), case.scale)
        check(got, oracle(world, case.query, case.scale, {"window": 60}), case, "by a plan")
        assert plan.bands
        world.offsets_bytes.reverse()
        world.content = [{p: (value, key) for p, (key, value) in tokens.items()} for tokens in world.content]


@pytest.mark.parametrize("length", [0, 50])
def test_a_negative_row_sees_nothing_whatever_its_length(length: int) -> None:
    case = plain_case(3, 50, 1)
    arguments = list(case.arguments())
    arguments[5], arguments[6] = torch.tensor([-1]), torch.tensor([length])
    for way in (op, attend_gathered):
        out, lse = way(*arguments)
        assert (out == 0).all() and (lse == -math.inf).all()


def test_tokens_behind_the_last_sequence_see_nothing() -> None:
    case = plain_case(3, 50, 4)
    more = torch.cat([case.query, torch.full((3, 4, 8), math.nan)])
    arguments = (case.world.arena, more, *case.arguments()[2:])
    want = oracle(case.world, case.query, case.scale, {})
    for way in (op, attend_gathered):
        out, lse = way(*arguments)
        check((out[:4], lse[:4]), want, case, "padded batch")
        assert (lse[4:] == -math.inf).all()
    assert (op(*arguments)[0][4:] == 0).all()


def test_what_is_passed_stays_as_it_is() -> None:
    for number in range(30):
        case = random_case(random.Random(f"kept {number}"))
        tensors = [each for each in (*case.arguments(), *case.options.values()) if isinstance(each, torch.Tensor)]
        before = [each.clone() for each in tensors]
        out, lse = op(*case.arguments(), **case.options)
        same = [
            torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
            for a, b in zip(tensors, before)
        ]
        assert all(same)
        memory = {each.untyped_storage().data_ptr() for each in tensors}
        assert out.untyped_storage().data_ptr() not in memory and lse.untyped_storage().data_ptr() not in memory


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that anything made."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(each, torch.Tensor):
                self.numbers = max(self.numbers, each.untyped_storage().nbytes() // each.element_size())
        return result


@pytest.mark.parametrize(
    ("options", "has_new", "most"),
    [
        ({"window": 128}, False, 2),
        ({"window": 128}, True, 2),
        ({"window": 128, "softcap": 5.0}, True, 4),
        ({"chunk": 256}, False, 2),
        ({"window": 4000}, True, 2),
    ],
)
def test_a_long_prefill_makes_nothing_quadratic(options: dict[str, Any], has_new: bool, most: int) -> None:
    length, window = 16384, options.get("window", options.get("chunk"))
    kept = -(-window // 16) * 16 if has_new else length
    entry_bytes, num_pages = 64, kept // 16 + 1
    arena = torch.full((num_pages * 16 * entry_bytes,), 0xFF, dtype=torch.uint8)
    page_table = torch.full((1, length // 16), -1, dtype=torch.int32)
    page_table[0, -kept // 16 :] = torch.arange(1, num_pages)
    key, value = torch.randn(length, 1, 8), torch.randn(length, 1, 8)
    stored = arena.view(torch.float32).view(-1, 16)
    stored[16:, :8], stored[16:, 8:] = key[-kept:, 0], value[-kept:, 0]
    query = torch.randn(length, 2, 8)
    if has_new:
        options = options | {"new_key": key, "new_value": value}
    tables = (torch.tensor([0, length]), page_table, torch.arange(num_pages, dtype=torch.int32))
    with Largest() as largest:
        out, lse = attend(
            *(arena, query, *tables, torch.tensor([0]), torch.tensor([length])),
            *(0, entry_bytes, 16, [0, 32], [8, 8], 1, ["float32"] * 2, 0.5),
            **options,
        )
    assert largest.numbers <= most * max(query.numel(), arena.numel(), 128 * (128 + window))
    for token in (0, 1, 127, 128, 5000, 16383):
        low = token - token % window if "chunk" in options else max(0, token - window + 1)
        scores = query[token].double() @ key[low : token + 1, 0].double().T * 0.5
        if "softcap" in options:
            scores = torch.tanh(scores / 5.0) * 5.0
        assert torch.allclose(
            out[token].double(), torch.softmax(scores, 1) @ value[low : token + 1, 0].double(), atol=1e-5
        )
        assert torch.allclose(lse[token].double(), scores.logsumexp(1), atol=1e-5)


def test_a_long_prefill_with_a_soft_cap_holds_few_scores() -> None:
    case = plain_case(5, 6000, 6000, num_kv_heads=1)
    with Largest() as largest:
        attend(*case.arguments(), softcap=2.0)
    assert largest.numbers < 6000 * 6000 / 10


# errors


def test_errors() -> None:
    case = plain_case(7, 60, 3)
    arguments = list(case.arguments())
    columns = torch.ones(1, 1, 60, dtype=torch.bool)
    with pytest.raises(ValueError, match="cover positions 1 to 60, but 0"):
        op(*arguments, mask=columns, first_column=1)
    with pytest.raises(ValueError, match="cover positions 0 to 58"):
        op(*arguments, mask=columns[..., :59])
    with pytest.raises(ValueError, match="for 2 queries a sequence, not for 3"):
        op(*arguments, bias=torch.zeros(1, 1, 2, 60))
    with pytest.raises(ValueError, match="new values"):
        op(*arguments, new_key=torch.zeros(3, 2, 8))
    with pytest.raises(ValueError, match="fewer|new ones among"):
        op(*arguments[:6], torch.tensor([2]), *arguments[7:])
    with pytest.raises(IndexError, match="columns"):
        op(*arguments[:6], torch.tensor([6000]), *arguments[7:])
    page_table = arguments[3].clone()
    page_table[case.world.rows[0], 2] = -1
    with pytest.raises(IndexError, match="no page for position 32"):
        op(*arguments[:3], page_table, *arguments[4:])
    plan = plan_reads(*(arguments[i].numpy() for i in (3, 4, 5, 6, 2)), 16, has_new=True)
    with pytest.raises(ValueError, match="plan"):
        attend_reads(case.world.arena, case.query, plan, *case.world.layout(), 1.0)


# registration


def samples() -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """A case with each of the options; opcheck cannot compare tensors of float8."""
    cases = [random_case(random.Random(f"sample {number}")) for number in range(80)]
    cases = [case for case in cases if torch.float8_e4m3fn not in case.world.dtypes]
    wanted = ("window", "softcap", "sinks", "mask", "bias", "indices", "new_key", "starts")
    chosen = [next(case for case in cases if name in case.options) for name in wanted]
    return [(case.arguments(), case.options) for case in chosen]


@pytest.mark.parametrize("number", range(8))
def test_opcheck(number: int) -> None:
    assert torch.Tag.pt2_compliant_tag in op.default.tags
    arguments, options = samples()[number]
    opcheck(op.default, arguments, options)


@pytest.mark.parametrize("number", range(8))
def test_on_an_accelerator_no_number_is_read(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, options = samples()[number]
    want = op(*arguments, **options)
    monkeypatch.setattr(reference, "on_host", lambda tensor: False)
    with FakeTensorMode() as mode:  # its tensors have no numbers: reading one, or a shape that depends on one, raises

        def without_numbers(value: Any) -> Any:
            return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

        got = attend_gathered(
            *map(without_numbers, arguments), **{name: without_numbers(value) for name, value in options.items()}
        )
    assert [(each.shape, each.dtype) for each in got] == [(each.shape, each.dtype) for each in want]


def test_an_arena_elsewhere_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    case = plain_case(9, 70, 6)
    want = oracle(case.world, case.query, case.scale, {})
    monkeypatch.setattr(reference, "on_host", lambda tensor: False)
    monkeypatch.setitem(attend.__globals__, "plan_reads", None)
    check(op(*case.arguments()), want, case, "elsewhere")


def test_on_the_meta_device_only_shapes_count() -> None:
    for arguments, options in samples():
        got = op(*map(on_meta, arguments), **{name: on_meta(value) for name, value in options.items()})
        want = op(*arguments, **options)
        assert [(each.device.type, each.shape, each.dtype) for each in got] == [
            ("meta", each.shape, each.dtype) for each in want
        ]


def on_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def test_under_compile() -> None:
    case = plain_case(11, 70, 1)
    arguments = case.arguments()

    def step(arena: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        return op(arena, query, *arguments[2:], window=20)[0] * 2

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*arguments[:2]), step(*arguments[:2]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 33])
def test_a_view_of_a_run_gives_what_its_pages_give(num_tokens: int, dtype: torch.dtype) -> None:
    """Rows one behind the other, among NaN."""
    entries = torch.full((5, 40, 3, 2, 8), math.nan).to(dtype)
    key, value = entries[1:4, 2 : 2 + num_tokens, 0], entries[1:4, 2 : 2 + num_tokens, 1]
    key.normal_(), value.normal_()
    query, sinks = torch.randn(3, 1, 6, 8).to(dtype).transpose(1, 2), torch.randn(6).to(dtype)
    for given in (None, sinks):
        out = attend_run(query, key.transpose(1, 2), value.transpose(1, 2), 0.5, given)
        for row in range(3):
            wide = (each[row].double().repeat_interleave(3, 1) for each in (key, value))
            want, lse = attention.plain(
                query[None, row, :, :].double(), *(each.transpose(0, 1)[None] for each in wide), 0.5
            )
            if given is not None:
                want, _ = attention.with_sinks(want[:, :, 0], lse[:, :, 0], given.double())
                want = want.unsqueeze(2)
            assert (out[row, 0].double() - want[0, :, 0]).abs().max() <= TOLERANCE[dtype]
