"""Packing: the new tokens of sequences that have unequally many, one sequence after another in one batch row.

Owns what tells the sequences apart in there, and what is refused of a forward over them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from torch_uma.arena import staged
from torch_uma.errors import SequenceError
from torch_uma.lifespans import spread

if TYPE_CHECKING:
    from torch_uma.plan import SubPool
    from torch_uma.step import Step
    from torch_uma.tables import Int64Array


class Packing:
    """The packed new tokens of one step.

    Attributes:
        num_tokens: of all sequences.
        token_starts, query_starts: [rows + 1] int64, the first token of each sequence and the end; on host and device.
        lengths: [rows] int64, tokens of each sequence with the new ones.
        positions: [1, num_tokens] int64.
        offsets: [num_tokens] int64, what is to be added to a token's place in the batch row to have its position.
    """

    def __init__(self, step: Step, device: torch.device) -> None:
        counts = np.broadcast_to(step.num_new_tokens, step.rows.shape)
        self._step = step
        self.token_starts: Int64Array = np.concatenate([[0], counts.cumsum()])
        self.num_tokens = int(self.token_starts[-1])
        of_tokens = np.stack([spread(step.past, counts), step.rows.repeat(counts)])
        self.positions, self._rows = staged(of_tokens, device).split(1)
        self.offsets: torch.Tensor = self.positions[0] - torch.arange(self.num_tokens, device=device)
        of_rows = np.stack([self.token_starts[1:], step.past + counts])
        ends, self.lengths = staged(of_rows, device)
        self.query_starts = torch.nn.functional.pad(ends, (1, 0))

    def entries(self, subpool: SubPool) -> torch.Tensor:
        """[1, num_tokens] int64, the entries of the new tokens, -1 for one that is not stored."""
        return self._step.entries(subpool, self.positions.T, self._rows[0]).T

    def check_forward(self, num_rows: int | None, num_new_tokens: int | None) -> None:
        """SequenceError if a forward has another batch, or number of tokens, than this one; None fits anything."""
        if num_rows in (None, 1) and num_new_tokens in (None, self.num_tokens):
            return
        raise SequenceError(
            f"this step takes the new tokens of {len(self.lengths)} sequences one after another, as "
            f"[1, {self.num_tokens}], but the forward has [{num_rows}, {num_new_tokens}]; pack them with torch.cat()"
        )
