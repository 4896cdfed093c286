"""The exact fit in motion: how many requests run where memory is nothing but bytes, first come, first served.

Owns the bound that `traces.py` compares with. No arena, no tables, no moves: a request holds the bytes of its tokens,
in pages of `page_size` tokens and without any padding, and whatever adds up to no more than there is fits. The policy
is that of widely used engines: in each round who runs goes on in order, prompts in chunks of what is left of
`step_tokens`; what does not fit takes the last of them out, to be run again from its first token; in a round in which
nobody had to go, those who wait come in, in order, while their whole text fits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch_uma.layout import Window
from torch_uma.plan import Plan

Lengths = tuple[int, int]  # tokens of a prompt and of its answer


@dataclass(frozen=True, kw_only=True)
class ExactFit:
    """What a sequence holds, in bytes: states, and by kind the bytes of a token and how many count (None: all)."""

    state_bytes: int
    kinds: tuple[tuple[int, int | None], ...]
    page_size: int = 1

    @classmethod
    def of(cls, plan: Plan, page_size: int = 1) -> ExactFit:
        """Of the layers of a plan whose kinds are states, windows and full attention with an entry a token."""
        state_bytes, kinds = 0, []
        for subpool in plan.subpools:
            entry_bytes = sum(placed.row.num_bytes for placed in subpool.layout.rows)
            assert subpool.is_state or subpool.tokens_per_entry == 1
            if subpool.is_state:
                state_bytes += entry_bytes
            else:
                window = subpool.lifetime.num_tokens if isinstance(subpool.lifetime, Window) else None
                kinds.append((entry_bytes, window))
        return cls(state_bytes=state_bytes, kinds=tuple(kinds), page_size=page_size)

    def held_bytes(self, num_tokens: int) -> int:
        """Of a sequence whose newest token is the `num_tokens`th."""
        if not num_tokens:
            return 0
        size, held = self.page_size, self.state_bytes
        end = -(-num_tokens // size)
        for token_bytes, window in self.kinds:
            first = 0 if window is None else max(0, num_tokens - window) // size
            held += (end - first) * size * token_bytes
        return held


@dataclass(frozen=True, kw_only=True)
class Served:
    """How it went: requests in memory as a mean over rounds, how often one was taken out, and the rounds."""

    mean_running: float
    preemptions: int
    num_rounds: int


@dataclass(kw_only=True)
class _Request:
    end_tokens: int  # of its text once it is finished, of which the last is never stored
    num_known: int  # of its text
    num_stored: int = 0
    held_bytes: int = 0


def first_come(
    fit: ExactFit, arena_bytes: int, lengths: Iterable[Lengths], *, max_running: int, step_tokens: int = 8192
) -> Served:
    """Serve requests that are all there at the beginning; each has to fit alone."""
    waiting = [_Request(end_tokens=prompt + new, num_known=prompt) for prompt, new in lengths][::-1]  # the next is last
    running: list[_Request] = []
    free_bytes, preemptions, num_rounds, running_rounds = arena_bytes, 0, 0, 0
    while waiting or running:
        num_rounds += 1
        budget, num_done, somebody_went = step_tokens, 0, False
        while num_done < len(running):
            request = running[num_done]
            count = min(request.num_known - request.num_stored, budget)
            more_bytes = fit.held_bytes(request.num_stored + count) - request.held_bytes
            while more_bytes > free_bytes:
                last = running.pop()
                free_bytes += last.held_bytes
                last.num_stored = last.held_bytes = 0
                waiting.append(last)
                preemptions += 1
                somebody_went = True
                if last is request:
                    break
            else:
                free_bytes -= more_bytes
                request.num_stored += count
                request.held_bytes += more_bytes
                budget -= count
                num_done += 1
        while waiting and not somebody_went and budget and len(running) < max_running:
            request = waiting[-1]
            if fit.held_bytes(request.num_known) > free_bytes:
                break
            running.append(waiting.pop())
            request.num_stored = min(request.num_known, budget)
            request.held_bytes = fit.held_bytes(request.num_stored)
            free_bytes -= request.held_bytes
            budget -= request.num_stored
        assert running, "a request does not fit alone"
        running_rounds += len(running)
        for request in running:
            if request.num_stored == request.num_known:
                request.num_known += 1
                if request.num_known == request.end_tokens:
                    free_bytes += request.held_bytes
        running = [request for request in running if request.num_known < request.end_tokens]
    return Served(mean_running=running_rounds / num_rounds, preemptions=preemptions, num_rounds=num_rounds)
