"""Plans and runs calls for one pool, step after step.

Owns the wrappers, their workspaces, and the moment at which one may be planned again: FlashInfer stages a plan in one
pinned buffer of a wrapper and copies it later, so that a second plan before that copy has passed would be read by the
first step.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_uma.arena import staged
from torch_uma.counts import whole
from torch_uma.errors import PlanError
from torch_uma.integrations.flashinfer.calls import Call
from torch_uma.integrations.flashinfer.forms import FUNCTIONS, Question
from torch_uma.integrations.flashinfer.library import Library, load
from torch_uma.integrations.flashinfer.pages import Pages
from torch_uma.integrations.flashinfer.storage import clear_sink
from torch_uma.integrations.flashinfer.wrappers import GraphSize, Tables, Wrapper, make, run_function
from torch_uma.layout import Chunk, Window
from torch_uma.pool import CachePool

_WORKSPACE_BYTES = 128 << 20


class Runner:
    """FlashInfer over one pool.

    Outside of a graph two wrappers take turns for each kind of call; a captured graph reads the buffers of one, which
    waits until its last plan has been copied. Those of a kind share one workspace, as they run one after another on
    the arena's stream.

    Args:
        pool: whose arena is read; its sink is cleared, so that padded rows read zeros.
        library: FlashInfer, imported if it is not given.
        num_rows: for steps that are captured in a graph: the rows that it is made for, padding included.
        workspace_bytes: for partial results.
    """

    def __init__(
        self,
        pool: CachePool,
        *,
        library: Library | None = None,
        num_rows: int | None = None,
        workspace_bytes: int = _WORKSPACE_BYTES,
    ) -> None:
        if num_rows is not None:
            num_rows = whole(num_rows, "num_rows of a graph", least=1, error=PlanError)
        workspace_bytes = whole(workspace_bytes, "workspace_bytes of a runner", least=1, error=PlanError)
        self._pool = weakref.ref(pool)  # which holds whoever attends over it
        self.num_rows = num_rows
        self._library = load() if library is None else library
        self._workspace_bytes = workspace_bytes
        self._workspaces: dict[str, Tensor] = {}
        self._rings: dict[tuple[str, Question], _Ring] = {}
        self._tables: dict[tuple[int, int | None, int], tuple[Pages, Tables]] = {}
        clear_sink(pool.arena)

    @property
    def pool(self) -> CachePool:
        """Whose arena is read."""
        pool = self._pool()
        assert pool is not None
        return pool

    def plan(self, call: Call) -> None:
        """Plan a call, unless a layer with the same plan and pages has been; PlanError while a graph is captured.

        For forms without a plan, what lies behind the last token of each row in its page is cleared, once for a page.
        Waits only for the copy of an earlier plan by the same wrapper, which has mostly passed.
        """
        if self.is_planned(call):
            return
        self._check_not_captured()
        # What is made is kept, and written again in any mode; and FlashInfer asks the current device what it can.
        with torch.inference_mode(False), torch.cuda.device_of(self.pool.arena.bytes):
            if call.form not in FUNCTIONS:
                size = 1 if self.num_rows is not None else 2
                ring = self._rings.setdefault((call.form, call.question.shared), _Ring(size))
                ring.plan(call, self._library, self._workspace(call), self._graph_size(call))
                return
            key = self._table_key(call)
            self._workspace(call)  # before a graph is captured
            self._clear_tails(call)
            self._tables[key] = (call.pages, self._tables_of(call, key, self._tables.get(key)))

    def is_planned(self, call: Call) -> bool:
        """Whether the call, or a layer with the same plan and pages, is what was planned last of its kind."""
        if call.form in FUNCTIONS:
            tables = self._tables.get(self._table_key(call))
            return tables is not None and tables[0] is call.pages
        ring = self._rings.get((call.form, call.question.shared))
        return ring is not None and ring.pages is call.pages

    def run(self, call: Call, query: Tensor, *, sinks: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Attention of `query` [T, Hq, Dk], which was planned: `[T, Hq, Dv]`, and natural log-sum-exps `[T, Hq]`.

        For latents a query has the numbers of the latent and then those of the rotary key. New tokens must have been
        written. `sinks` [Hq] as said in the question. The forms of XQA give no log-sum-exps. Does not wait, and can be
        captured; a replay reads what was planned last. PlanError for a call that was not planned, and for queries or
        sinks of another shape or dtype.
        """
        query = _checked(call, query, sinks).contiguous()
        views = call.storage.tensors(self.pool.arena.bytes)
        if not self.is_planned(call):
            raise PlanError("the call was not planned for this step; plan it first")
        with torch.cuda.device_of(self.pool.arena.bytes):
            if call.form in FUNCTIONS:
                tables = self._tables[self._table_key(call)][1]
                out, lse = run_function(self._library, call, query, views, sinks, self._workspace(call), tables)
            else:
                out, lse = self._rings[call.form, call.question.shared].current.run(call, query, views, sinks)
        return out, None if lse is None else lse * math.log(2)

    def _check_not_captured(self) -> None:
        if self.pool.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise PlanError(
                "a step cannot be planned while a graph is captured; plan it before, and before each replay"
            )

    def _workspace(self, call: Call) -> Tensor:
        """Forms without a plan keep counters in theirs, which begin at zero, where others have partial results."""
        kind = call.form.partition("_")[0] if call.form in FUNCTIONS else "planned"
        if kind not in self._workspaces:
            make = torch.empty if kind == "planned" else torch.zeros
            self._workspaces[kind] = make(self._workspace_bytes, dtype=torch.uint8, device=self.pool.device)
        return self._workspaces[kind]

    def _graph_size(self, call: Call) -> GraphSize | None:
        if self.num_rows is None:
            return None
        if len(call.pages.lengths) != self.num_rows:
            raise PlanError(
                f"the graph is made for {self.num_rows} rows, and the call has {len(call.pages.lengths)}; pad it with "
                f"plan_call(..., num_rows={self.num_rows})"
            )
        return GraphSize(num_rows=self.num_rows, pages_per_row=self._most_pages(call))

    def _most_pages(self, call: Call) -> int:
        """Of one row, as long as the pool lets it get."""
        geometry = call.question.geometry
        columns = self.pool.tables.columns[geometry.subpool]
        if isinstance(geometry.lifetime, Window | Chunk):
            seen = geometry.lifetime.num_tokens + call.question.most_new_tokens - 1
            return min(columns, (seen + geometry.page_size - 2) // geometry.page_size + 1)
        return columns

    def _clear_tails(self, call: Call) -> None:
        """Clear what lies behind the last token of each row in its page, once for a page: it may be NaN.

        Forms with a plan fill with zeros. TRT-LLM's, and XQA's for fp8 on a Hopper, fetch pages whole by TMA and do not
        say what they make of the rest.
        """
        books, pages = self.pool.sequences, call.pages
        rows = np.flatnonzero(~books.is_clear[pages.last_ids])
        if len(rows):
            subpool = self.pool.plan.subpools[call.question.geometry.subpool]
            entries = self.pool.arena.pages(subpool).view(-1, subpool.entry_bytes)
            entries.index_fill_(0, staged(pages.tails(rows), entries.device), 0)
            books.is_clear[pages.last_ids[rows]] = True

    def _table_key(self, call: Call) -> tuple[int, int | None, int]:
        """What tables depend on: the sub-pool, the columns that a graph needs, and the queries of a row in masks."""
        columns = None if self.num_rows is None else self._most_pages(call)
        most_new_tokens = call.question.most_new_tokens if call.form == "xqa_drafts" else 0
        return call.question.geometry.subpool, columns, most_new_tokens

    def _tables_of(self, call: Call, key: tuple[int, int | None, int], known: tuple[Pages, Tables] | None) -> Tables:
        _, columns, most_new_tokens = key
        made = Tables(call.pages, self.pool.device, columns, most_new_tokens)
        if self.num_rows is None or known is None:
            return made
        known[1].update(made)  # a graph reads them where they are
        return known[1]


def _checked(call: Call, query: Tensor, sinks: Tensor | None) -> Tensor:
    """`query`. Kernels are told how many there are, and would read on behind fewer: PlanError for other than said."""
    question, dims = call.question, call.question.geometry.dims
    width = sum(dims) if question.geometry.is_latent else dims[0]
    shape = (call.pages.num_tokens, question.num_heads, width)
    if tuple(query.shape) != shape or query.dtype != question.dtype:
        raise PlanError(
            f"queries of this call are {question.dtype} of shape {shape}, padding included, not {query.dtype} of shape "
            f"{tuple(query.shape)}"
        )
    if (sinks is not None) != question.has_sinks:
        raise PlanError("sinks are given where the question says so, and nowhere else; ask with has_sinks")
    if sinks is not None and tuple(sinks.shape) != (question.num_heads,):
        raise PlanError(f"sinks are one number for each of {question.num_heads} heads, not of {tuple(sinks.shape)}")
    return query


class _Ring:
    """Wrappers that take turns, each with the event of its last plan's copy."""

    def __init__(self, size: int) -> None:
        self._wrappers: list[Wrapper | None] = [None] * size
        self._copied: list[Any] = [None] * size
        self._turn = 0
        self.pages: Pages | None = None

    @property
    def current(self) -> Wrapper:
        """The one that was planned last."""
        wrapper = self._wrappers[self._turn]
        assert wrapper is not None
        return wrapper

    def plan(self, call: Call, library: Library, workspace: Tensor, graph: GraphSize | None) -> None:
        turn = (self._turn + 1) % len(self._wrappers)
        wrapper = self._wrappers[turn]
        if wrapper is None:
            wrapper = self._wrappers[turn] = make(library, call, workspace, graph)
        if self._copied[turn] is not None:
            self._copied[turn].synchronize()
        self.pages = None  # a plan that fails leaves nothing to run
        wrapper.plan(call)
        copied = self._copied[turn] = library.event()
        copied.record()
        self._turn, self.pages = turn, call.pages
