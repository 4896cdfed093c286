"""How many pages requests will hold in the round to come and in the next ones: the stages that all have to fit.

A stage is one moment, as pages of each sub-pool more than are held now. The first is that of the round's prompts, whose
forwards count as one; the others are decode steps. A request's share is what it adds to each.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from torch_uma.books import Sequences
from torch_uma.demands import may_stay, pages_ahead, pages_alone, released_by_step, step_pages
from torch_uma.lifespans import EVERY, NEVER, Lifespans
from torch_uma.plan import Plan
from torch_uma.tables import Int64Array


class Outlook:
    """Shares in the stages of a round: its prompts, and then the decode steps `steps`, counted from 1.

    Shares are [1 + len(steps), sub-pools] int64.
    """

    def __init__(self, plan: Plan, lifespans: Lifespans, steps: tuple[int, ...]) -> None:
        self.steps = np.array(steps, np.int64)
        self._plan = plan
        self._lifespans = lifespans
        self._page_tokens: list[int] = lifespans.page_tokens.tolist()
        # Whoever waits is asked about in every round.
        self._fresh = lru_cache(maxsize=256)(self._share_of_fresh)
        self._restored = lru_cache(maxsize=256)(self._share_of_restored)

    def none(self) -> Int64Array:
        """The share of nobody."""
        return np.zeros((1 + len(self.steps), self._lifespans.num_subpools), np.int64)

    def most_growth(self, num_rows: int, num_steps: int) -> list[int]:
        """Pages by sub-pool that rows which share none may take in so many decode steps, and no more in any case."""
        return [0 if tokens == NEVER else num_rows * -(-num_steps // tokens) for tokens in self._page_tokens]

    def decoding(self, books: Sequences, rows: Int64Array, left: Int64Array) -> Int64Array:
        """[1 + steps, sub-pools, n] shares of rows that decode, and will for `left` [n] more tokens, at least 1."""
        if may_stay(books):
            ahead = np.zeros((1 + int(self.steps[-1]), self._lifespans.num_subpools, len(rows)), np.int64)
            ahead[1:] = pages_ahead(books, rows, len(ahead) - 1)
            steps = np.concatenate([np.zeros((1, len(rows)), np.int64), np.minimum(self.steps[:, None], left)])
            chosen: Int64Array = np.take_along_axis(ahead, steps[:, None], axis=0)
            return chosen
        first, end = books.first.take(rows, axis=1), books.end.take(rows, axis=1)
        new = books.length.take(rows) + np.minimum(self.steps[:, None], left)  # [steps, n]
        pages = np.maximum(end, self._lifespans.num_pages(EVERY, new[:, None]))
        pages -= self._lifespans.first_needed_page(EVERY, new[:, None] - 1)
        shares = np.zeros((1 + len(self.steps), *end.shape), np.int64)
        np.subtract(pages, end - first, out=shares[1:])
        return shares

    def prompt(self, books: Sequences, row: int, num_tokens: int, is_last: bool, left: int) -> Int64Array:
        """The share of a row that runs `num_tokens` more of its prompt; after the last it decodes, `left` times."""
        rows = np.array([row])
        taken = step_pages(books, rows, num_tokens)[:, 0]
        share = np.repeat(taken[None], 1 + len(self.steps), axis=0)
        share[1:] -= released_by_step(books, rows, num_tokens)[:, 0]
        if is_last:
            length = int(books.length[row]) + num_tokens
            added = self._decoding_after(length, left)
            if may_stay(books):  # what others hold of the row, too, stays where the row lets go of it
                staying = (books.end[:, row] - books.first[:, row]) - pages_alone(books, rows)[:, 0]
                ends = self._lifespans.num_pages(EVERY, length + np.clip(self.steps - 1, 0, left)).T
                added = np.minimum(added + staying, ends - self._lifespans.num_pages(EVERY, np.array([length])).T)
            share[1:] += added
        return share

    def fresh(self, num_tokens: int, num_run: int, left: int) -> Int64Array:
        """The share of a request that is given room for `num_tokens`, and runs `num_run` of them; not to be changed."""
        return self._fresh(num_tokens, num_run, min(left, int(self.steps[-1])))

    def restored(self, num_tokens: int, left: int) -> Int64Array:
        """The share of a request that gets back what it had, and decodes from this round on; not to be changed."""
        return self._restored(num_tokens, min(left, int(self.steps[-1])))

    def _share_of_fresh(self, num_tokens: int, num_run: int, left: int) -> Int64Array:
        held = np.array(self._plan.demand(num_tokens), np.int64)
        share = np.repeat(held[None], 1 + len(self.steps), axis=0)
        np.maximum(share[0], self.fullest(0, num_run), out=share[0])
        if num_run == num_tokens:
            share[1:] += self._decoding_after(num_tokens, left)
        else:  # of the room ahead, what is behind the window by then has gone
            every, run = np.arange(len(held)), np.array(num_run)
            reach = np.maximum(held, self._lifespans.num_pages(every, run))
            share[1:] = reach - self._lifespans.first_needed_page(every, run)
        return share

    def _share_of_restored(self, num_tokens: int, left: int) -> Int64Array:
        share = self.none()
        share[0] = self._plan.demand(num_tokens)
        for stage, step in enumerate(np.minimum(self.steps, left).tolist(), 1):
            share[stage] = self.fullest(num_tokens + step - 1, num_tokens + step)
        return share

    def fullest(self, past: int, new: int) -> Int64Array:
        """[sub-pools] pages that a row without room ahead holds while it goes from `past` to `new` tokens."""
        return fullest(self._lifespans, np.array([past]), np.array([new]))[:, 0]

    def _decoding_after(self, num_tokens: int, left: int) -> Int64Array:
        """[steps, sub-pools] what a row adds to its `num_tokens` in decode steps that begin with the next round."""
        held = np.array(self._plan.demand(num_tokens), np.int64)
        added = np.zeros((len(self.steps), len(held)), np.int64)
        for stage, step in enumerate(np.minimum(self.steps - 1, left).tolist()):
            if step > 0:
                added[stage] = self.fullest(num_tokens + step - 1, num_tokens + step) - held
        return added


def fullest(lifespans: Lifespans, past: Int64Array, new: Int64Array) -> Int64Array:
    """[sub-pools, n] pages that rows without room ahead hold while they go from `past` to `new` tokens, [n] each."""
    past_end = lifespans.num_pages(EVERY, past)
    # A single token has a place in its step even if it is dead then.
    first_new = np.where(new - past == 1, past_end, np.maximum(past_end, lifespans.first_needed_page(EVERY, new)))
    pages: Int64Array = past_end - lifespans.first_needed_page(EVERY, past)
    pages += np.maximum(0, lifespans.num_pages(EVERY, new) - first_new)
    pages[list(lifespans.states)] = 1
    return pages
