"""`torch_uma.attend` by FlashInfer: the substitute that a pool on an NVIDIA device has.

Owns the way from the arguments of the op to a call: which layer and which open step they are of. A step is planned at
the first layer that asks, from the host's tables. What FlashInfer does not serve is left to the op's own code.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_uma.counts import whole
from torch_uma.errors import PlanError
from torch_uma.integrations.flashinfer.calls import Call
from torch_uma.integrations.flashinfer.forms import Question, choose
from torch_uma.integrations.flashinfer.library import Library, why_off
from torch_uma.integrations.flashinfer.pages import Pages, pages_of
from torch_uma.integrations.flashinfer.runner import Runner
from torch_uma.integrations.flashinfer.storage import Storage, storage_of
from torch_uma.layout import Chunk, Window
from torch_uma.ops import substitutes
from torch_uma.pool import CachePool
from torch_uma.step import Step


class _Asked(NamedTuple):
    """What a kind of call is: answered by `form`, unless there is a `reason` why not."""

    storage: Storage
    question: Question
    form: str
    reason: str | None

    def over(self, pages: Pages) -> Call:
        return Call(form=self.form, question=self.question, storage=self.storage, pages=pages)


class Attention:
    """Answers `torch.ops.torch_uma.attend` for the open steps of one pool.

    Args:
        pool: whose steps; it must hold this object.
        library: FlashInfer, imported at the first call if it is not given.
        num_rows: for one step after another that replay a graph of so many rows, padding included: `plan(step)` before
            every replay. Without it nothing is answered while a graph is captured, since a replay would read an old
            plan.
        capability: of the device, where it is not the current one.

    Attributes:
        declined: why the last call of each kind was left to the op's own code.
    """

    def __init__(
        self,
        pool: CachePool,
        *,
        library: Library | None = None,
        num_rows: int | None = None,
        capability: tuple[int, int] | None = None,
    ) -> None:
        if num_rows is not None:
            num_rows = whole(num_rows, "num_rows of a graph", least=1, error=PlanError)
        self._pool = weakref.ref(pool)
        self._library = library
        self._num_rows = num_rows
        self._capability = capability
        self._runner: Runner | None = None
        self._layers = _layers_by_place(pool)
        self._pages: weakref.WeakKeyDictionary[Step, dict[int, Pages | str]] = weakref.WeakKeyDictionary()
        self._asked: dict[tuple[Any, ...], _Asked] = {}
        self.declined: dict[tuple[Any, ...], str] = {}

    def plan(self, step: Step) -> None:
        """Plan all that has been asked in earlier steps, for a step that replays a graph: before the replay.

        PlanError where a step of this kind is not served, or none has been yet. Waits only for the copy of an earlier
        plan.
        """
        is_any = False
        for asked in self._asked.values():
            if asked.reason is not None:
                continue
            pages = self._pages_of(step, asked.storage.geometry.subpool)
            if isinstance(pages, str):
                raise PlanError(pages)
            if asked.question.most_new_tokens == _one_or_more(pages):
                self._run().plan(asked.over(pages))
                is_any = True
        if not is_any:
            raise PlanError("no step of this kind has been served yet; run one before its graph is captured")

    def attend(
        self,
        arena: Tensor,
        query: Tensor,
        query_starts: Tensor,
        page_table: Tensor,
        v2p: Tensor,
        rows: Tensor,
        lengths: Tensor,
        origin_bytes: int,
        entry_bytes: int,
        page_size: int,
        offsets_bytes: Sequence[int],
        dims: Sequence[int],
        num_kv_heads: int,
        dtypes: Sequence[str],
        scale: float,
        *,
        window: int = 0,
        chunk: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        new_key: Tensor | None = None,
        new_value: Tensor | None = None,
        first_column: int = 0,
        **others: Tensor | None,
    ) -> tuple[Tensor, Tensor] | None:
        """What the op gives, or None where it is left to do it: the reason is in `declined`."""
        at = (origin_bytes + offsets_bytes[0], origin_bytes + offsets_bytes[1])
        place = (page_table.data_ptr(), *at, tuple(dims), num_kv_heads)
        kind = (*place, query.dtype, query.shape[1], scale, window, chunk, softcap, sinks is not None)
        given = [name for name, tensor in others.items() if tensor is not None]
        storage, step = self._layers.get(place), self._step_of(rows)
        if given:
            found: Call | str = f"FlashInfer's forms take no {', '.join(given)}"
        elif storage is None or (window, chunk) != _width(storage):
            found = "no layer of the plan stores such keys and values with this window or chunk"
        elif step is None:
            found = "no open step of the pool is over these rows"
        elif new_key is not None and not step.writes_first:
            found = "new keys are given, which may not have been written"
        elif self._num_rows is None and arena.is_cuda and torch.cuda.is_current_stream_capturing():
            found = "a replay of the graph that is captured would read the plan of this step"
        else:
            found = self._call(kind, storage, step, query, scale, softcap, sinks is not None)
            if isinstance(found, Call) and not self._may_plan() and not self._run().is_planned(found):
                found = "the current stream is not the arena's, as when torch.compile warms up a graph"
        if isinstance(found, str):
            self.declined[kind] = found
            return None
        self._run().plan(found)
        out, lse = self._run().run(found, query, sinks=sinks)
        assert lse is not None
        return out, lse

    def _call(
        self,
        kind: tuple[Any, ...],
        storage: Storage,
        step: Step,
        query: Tensor,
        scale: float,
        softcap: float,
        has_sinks: bool,
    ) -> Call | str:
        """What FlashInfer is given, or why it is not."""
        pages = self._pages_of(step, storage.geometry.subpool)
        if isinstance(pages, str):
            return pages
        if query.shape[0] != pages.num_tokens:
            return "the queries are not the new tokens of the step"
        kind = (*kind, _one_or_more(pages), step.writes_first)
        asked = self._asked.get(kind)
        if asked is None:
            question = Question(
                geometry=storage.geometry,
                num_heads=query.shape[1],
                dtype=query.dtype,
                most_new_tokens=_one_or_more(pages),
                scale=scale,
                softcap=softcap,
                has_sinks=has_sinks,
                capability=self._capability or torch.cuda.get_device_capability(query.device),
                has_finite_dead_rows=step.writes_first,
            )
            try:
                asked = _Asked(storage, question, choose(question), None)
            except PlanError as error:
                asked = _Asked(storage, question, "", str(error))
            self._asked[kind] = asked
        return asked.reason or asked.over(pages)

    def _alive(self) -> CachePool:
        pool = self._pool()
        assert pool is not None
        return pool

    def _run(self) -> Runner:
        if self._runner is None:
            self._runner = Runner(self._alive(), library=self._library, num_rows=self._num_rows)
        return self._runner

    def _may_plan(self) -> bool:
        """Whether work goes to the arena's stream.

        A plan keeps tensors, and on another stream these may be of the memory of a graph, which torch.compile takes for
        a leak; and the events of plans are of the arena's.
        """
        stream = self._alive().guard.epochs.stream
        return stream is None or bool(torch.cuda.current_stream(stream.device) == stream)

    def _step_of(self, rows: Tensor) -> Step | None:
        """The open step over these rows of the tables; in a graph, whose rows have padding, the only one.

        A multi-step is none, as its lengths grow on the device, where nothing can be planned.
        """
        steps = [step for step in self._alive().guard.steps.values() if isinstance(step, Step)]
        if self._num_rows is not None:
            return steps[0] if len(steps) == 1 else None
        return next((step for step in steps if step.rows_on_device.data_ptr() == rows.data_ptr()), None)

    def _pages_of(self, step: Step, subpool: int) -> Pages | str:
        """What the rows read, made once for a step, or why that cannot be said."""
        known = self._pages.setdefault(step, {})
        if subpool not in known:
            try:
                known[subpool] = pages_of(step, self._alive().plan.subpools[subpool], num_rows=self._num_rows)
            except PlanError as error:
                known[subpool] = str(error)
        return known[subpool]


def use(
    pool: CachePool,
    *,
    library: Library | None = None,
    num_rows: int | None = None,
    capability: tuple[int, int] | None = None,
) -> Attention | None:
    """Let FlashInfer answer `attend` over a pool's arena; arguments as of `Attention`. None where it is left off.

    A pool on a CUDA device calls it when it is made. Kernels are compiled when they are first asked for: `warm_up` does
    it beforehand.
    """
    if library is None and why_off(pool.device) is not None:
        return None
    attention = Attention(pool, library=library, num_rows=num_rows, capability=capability)
    pool.substitute = attention
    substitutes.register(pool.arena.bytes, attention)
    return attention


def leave_off(pool: CachePool) -> None:
    """Let the op's own code attend over this pool's arena."""
    substitutes.unregister(pool.arena.bytes)
    pool.substitute = None


def _layers_by_place(pool: CachePool) -> dict[tuple[Any, ...], Storage]:
    """Layers by where their keys and values lie, as the op says it: a key is the latent and its rotary key."""
    places = {}
    for index in range(len(pool.plan.layers)):
        try:
            storage = storage_of(pool.plan, index)
        except PlanError:
            continue  # it stores no pair of keys and values, so that the op is not asked with such a place
        (key, value), dims = storage.offsets_bytes, storage.geometry.dims
        if storage.geometry.is_latent:
            value, dims = key, (sum(dims), dims[0])
        # Grids of two sub-pools can begin at one byte; their page tables cannot.
        table = pool.tables.page_table(storage.geometry.subpool).data_ptr()
        places[table, key, value, dims, storage.geometry.num_kv_heads] = storage
    return places


def _width(storage: Storage) -> tuple[int, int]:
    """Window and chunk, as the op takes them."""
    lifetime = storage.geometry.lifetime
    window = lifetime.num_tokens if isinstance(lifetime, Window) else 0
    return window, lifetime.num_tokens if isinstance(lifetime, Chunk) else 0


def _one_or_more(pages: Pages) -> int:
    """1, or 2 for any more new tokens of one row: which forms serve depends on no more than that."""
    return min(pages.most_new_tokens, 2)
