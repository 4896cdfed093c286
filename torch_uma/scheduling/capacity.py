"""How long a request may be over a pool: asked when a scheduler is made, and of each request that comes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_uma.counts import whole
from torch_uma.errors import OutOfMemory, PlanError, SequenceError
from torch_uma.placement import Quote
from torch_uma.scheduling.need import Need, need_of

if TYPE_CHECKING:
    from torch_uma.pool import CachePool


class Capacity:
    """The longest request that a pool holds alone, `longest` tokens of prompt and answer, or the longest asked for.

    PlanError if the pool cannot hold one of `max_request_tokens`, or one at all.
    """

    def __init__(self, pool: CachePool, max_request_tokens: int | None) -> None:
        self._pool = pool
        self.longest = self._longest_held() if max_request_tokens is None else self._checked(max_request_tokens)

    def need(self, num_tokens: int, now: Quote | None = None) -> Need:
        """What a request needs whose text is `num_tokens` long at its end."""
        return need_of(self._pool.allocator, self._pool.sequences.lifespans, num_tokens, now)

    def check(self, prompt: int, new: int, *, most: int) -> None:
        """Raise SequenceError for a request beyond `most` tokens, OutOfMemory where the arena could not hold it."""
        if prompt + new <= most:
            return
        need = self.need(prompt + new)
        what = f"a request of {prompt} tokens and {new} new ones is longer than the {most} that are taken"
        if not need.fits_empty:
            raise OutOfMemory(
                f"{what}: {need}, and the whole arena has {self._pool.plan.arena_bytes:,}; ask for fewer new tokens, "
                "or give the arena more memory",
                self._pool.allocator.quote(list(need.pages.values())),
            )
        raise SequenceError(
            f"{what}; ask for fewer new tokens, or raise what limits it: max_request_tokens, the pool's max_tokens, or "
            "the positions of the model"
        )

    def _checked(self, max_request_tokens: int) -> int:
        wanted = whole(max_request_tokens, "max_request_tokens of a scheduler", least=2, error=PlanError)
        need, tables = self.need(wanted), self._pool.tables.max_tokens
        if wanted > tables + 1 or not need.fits_empty:
            raise PlanError(
                f"the pool cannot hold one request of {wanted} tokens: {need}, and the arena has "
                f"{self._pool.plan.arena_bytes:,} bytes and tables for {tables} tokens; give the pool more memory or "
                "larger max_tokens, or the scheduler smaller max_request_tokens"
            )
        return wanted

    def _longest_held(self) -> int:
        most = self._pool.tables.max_tokens + 1
        least = self.need(2)
        if not least.fits_empty:
            raise PlanError(
                f"the pool cannot hold one request: {least}, and the arena has {self._pool.plan.arena_bytes:,} bytes; "
                "give it more memory"
            )
        if self.need(most).fits_empty:
            return most
        fitting, refused = 2, most
        while refused - fitting > 1:
            middle = (fitting + refused) // 2
            if self.need(middle).fits_empty:
                fitting = middle
            else:
                refused = middle
        return fitting


def lengths(num_prompt_tokens: int, max_new_tokens: int) -> tuple[int, int]:
    """Both as whole numbers of at least 1; SequenceError for others."""
    return (
        whole(num_prompt_tokens, "num_prompt_tokens of a request", least=1, error=SequenceError),
        whole(max_new_tokens, "max_new_tokens of a request", least=1, error=SequenceError),
    )
