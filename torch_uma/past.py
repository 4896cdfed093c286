"""The past of a sequence: what it needed when it was shorter, kept for as long as it may be cropped to that again.

Owns when the pages of windows and chunks are let go of in rows that keep a past, how such rows get shorter, and which
of two rows has which state. Without a past pages go in the step in which they die (`growth`).
"""

from __future__ import annotations

import numpy as np

from torch_uma.books import Sequences
from torch_uma.lifespans import NEVER, spread
from torch_uma.tables import Int64Array


def keep_past(books: Sequences, rows: Int64Array, num_tokens: int) -> None:
    """From now on, let rows keep all that they need to be cropped to `num_tokens` or more, until `let_past_go`.

    New tokens are then stored even if they are dead before their step ends. A state is not kept. What rows that keep
    less already have not stored does not come back.
    """
    books.kept[rows] = np.maximum(num_tokens, np.minimum(books.kept[rows], books.length[rows]))
    books.last_needing[:, rows] = NEVER


def let_past_go(books: Sequences, rows: Int64Array) -> None:
    """Let go of the pages that rows hold beyond what their lengths need."""
    rows = rows[books.kept[rows] < NEVER]
    every = np.arange(len(books.first))[:, None]
    first, needed = books.first.take(rows, axis=1), books.lifespans.first_needed_page(every, books.length[rows])
    books.drop_cells(spread((books.tables.origin.take(rows, axis=1) + first).ravel(), (needed - first).ravel()))
    books.first[:, rows] = needed
    books.last_needing[:, rows] = books.lifespans.last_needing(every, needed)
    books.kept[rows] = NEVER


def rewind(books: Sequences, rows: Int64Array, num_tokens: int, room_end: Int64Array) -> None:
    """Shorten rows of one length that keep their past to `num_tokens` tokens, and let their past go.

    `room_end` [sub-pools, rows]: pages up to these columns stay with the rows as room. A state stays as it is.
    SequenceError if what the rows need then is gone; then nothing has changed.
    """
    books.check_kept(int(rows[0]), num_tokens)
    every, old_end = np.arange(len(books.first))[:, None], books.end.take(rows, axis=1)
    end = books.lifespans.num_pages(every, np.full(len(rows), num_tokens))
    end = np.minimum(np.maximum(end, room_end), old_end)
    books.drop_cells(spread((books.tables.origin.take(rows, axis=1) + end).ravel(), (old_end - end).ravel()))
    books.end[:, rows] = end
    books.capacity[:, rows] = end * books.lifespans.page_tokens[:, None]
    books.length[rows] = num_tokens
    books.tables.write_lengths(rows, num_tokens)
    books.may_share[rows] = books.num_shared > 0
    let_past_go(books, rows)


def exchange_states(books: Sequences, rows: Int64Array, others: Int64Array) -> None:
    """Give `rows` the states of `others`, and the other way round; the states stay where they are."""
    for k in books.lifespans.states:
        cells, other_cells = books.tables.origin[k, rows], books.tables.origin[k, others]
        ids = books.tables.mirror[cells].copy()
        books.tables.write(cells, books.tables.mirror[other_cells])
        books.tables.write(other_cells, ids)
    books.may_share[rows] = books.may_share[others] = books.num_shared > 0
