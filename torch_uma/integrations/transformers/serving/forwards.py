"""The forwards of a round, run: the logits behind the last new token of each sequence that is to have a next one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from torch_uma.arena import staged
from torch_uma.batch import Batch
from torch_uma.integrations.transformers.cache import UnifiedCache
from torch_uma.integrations.transformers.serving.compiled import CompiledDecode
from torch_uma.integrations.transformers.serving.last_tokens import LastTokens
from torch_uma.integrations.transformers.serving.pace import Pace
from torch_uma.integrations.transformers.serving.traits import Traits
from torch_uma.tables import Int64Array

if TYPE_CHECKING:
    from torch_uma.pool import CachePool
    from torch_uma.scheduling import Forward


class Forwards:
    """A model over the steps of a pool. `pace` is of the forwards over prompts."""

    def __init__(
        self, model: Any, pool: CachePool, traits: Traits, last_tokens: LastTokens, compiled: CompiledDecode | None
    ) -> None:
        self._model = model
        self._pool = pool
        self._traits = traits
        self._last_tokens = last_tokens
        self._compiled = compiled
        self.pace = Pace(pool.device)

    def run(self, forward: Forward) -> Tensor | None:
        """The logits [sampled, vocabulary] of the forward's requests that sample, in order; None if none does.

        Does not wait for the device. Raises what the model and the step raise; the step is aborted then.
        """
        if forward.is_decode:
            return self._decode(forward)
        with self.pace.of(sum(forward.counts)), self._pool.step(forward.batch, forward.num_new_tokens) as cache:
            logits = self._last_logits(forward, cache)
        return logits if forward.samples.any() else None

    def _decode(self, forward: Forward) -> Tensor:
        with self._decode_step(forward) as (cache, batch):
            ids = self._last_tokens.feed(forward, batch)
            if self._compiled is None or not forward.starts.any():  # a graph is of rows of which some hold tokens
                logits = self._logits(self._model, ids, cache)
            else:
                with self._compiled.graph(len(batch)):
                    logits = self._logits(self._compiled.model(len(batch)), ids, cache)
        return logits[: len(forward.requests), -1]

    @contextmanager
    def _decode_step(self, forward: Forward) -> Iterator[tuple[UnifiedCache, Batch]]:
        if self._compiled is not None:
            with self._compiled.step(forward.batch) as stepped:
                yield stepped
        else:
            with self._pool.step(forward.batch, 1) as cache:
                yield cache, forward.batch

    def _last_logits(self, forward: Forward, cache: UnifiedCache) -> Tensor:
        """[sampled, vocabulary]; whatever it is where none samples."""
        ids = self._last_tokens.prompt(forward)
        is_packed = isinstance(forward.num_new_tokens, list)
        if not is_packed:
            logits = self._logits(self._model, ids.view(len(forward.requests), -1), cache, keep=1)[:, -1]
            return logits if forward.samples.all() else logits[self._staged(forward.samples.nonzero()[0])]
        places = np.cumsum(forward.counts) - 1
        last = self._staged(places[forward.samples] if forward.samples.any() else places[-1:])
        if self._traits.keeps_logits:
            return self._logits(self._model, ids[None], cache, keep=last)[0]
        return self._logits(self._model, ids[None], cache)[0, last]

    def _logits(self, model: Any, ids: Tensor, cache: UnifiedCache, keep: int | Tensor | None = None) -> Tensor:
        """[*ids.shape, vocabulary], or of the tokens to `keep` alone, where the model can be told that."""
        options: dict[str, Any] = {self._traits.cache_argument: cache, "use_cache": True}
        if keep is not None and self._traits.keeps_logits:
            options["logits_to_keep"] = keep
        logits: Tensor = model(ids, **options, **cache.inputs()).logits
        return logits

    def _staged(self, numbers: Int64Array) -> Tensor:
        return staged(np.ascontiguousarray(numbers, np.int64), self._pool.device)
