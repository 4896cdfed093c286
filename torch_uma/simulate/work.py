"""What a model's forward costs: floating-point operations and bytes, as a roofline counts them.

Owns the arithmetic, for any model whose shapes are known. Nothing here is fitted to a measurement. Products with
weights, attention of each kind and states follow one another, each at its own bound. Attention reads the keys and
values of each sequence once a forward, and reads and writes its states once; weights are read once a forward, of
experts those that some token is expected to choose.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from torch_uma.errors import PlanError
from torch_uma.scheduling.round import Forward
from torch_uma.simulate.device import Device
from torch_uma.tables import Int64Array


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Layers of attention that are alike: how far they look, in tokens (None: all), and what one of them costs.

    `token_bytes`: of keys and values of a token. `pair_flops`: of a query and a key. `is_chunked`: not the last
    `window` tokens are seen, but those of the query's own chunk, which begin at multiples of `window`.
    """

    window: int | None
    num_layers: int
    token_bytes: float
    pair_flops: float
    is_chunked: bool = False

    def num_keys(self, past: Int64Array, num_new_tokens: int) -> int:
        """Keys that rows with `past` [n] tokens read, each once, when all of them take so many new ones."""
        if self.window is None:
            seen = past
        else:
            seen = past % self.window if self.is_chunked else np.minimum(past, self.window - 1)
        return int(seen.sum()) + num_new_tokens

    def num_pairs(self, past: Int64Array, new: Int64Array | int) -> int:
        """Queries and keys that meet when rows with `past` [n] tokens take `new` ones, each or all so many."""
        return int((self._num_pairs_until(past + new) - self._num_pairs_until(past)).sum())

    def _num_pairs_until(self, length: Int64Array) -> Int64Array:
        """[n] those of the queries at the positions before `length`."""
        window = self.window
        if window is None:
            return length * (length + 1) // 2
        if self.is_chunked:
            inside = length % window
            return length // window * (window * (window + 1) // 2) + inside * (inside + 1) // 2
        inside = np.minimum(length, window)
        return inside * (inside + 1) // 2 + (length - inside) * window


@dataclass(frozen=True, kw_only=True)
class Work:
    """What the forwards of one model cost.

    Attributes:
        weight_bytes: of all that every forward reads, the head included, the embedding not.
        expert_bytes: of all experts of all layers; `num_experts` in a layer, of which a token chooses
            `experts_per_token`.
        token_flops: of a token through all layers, without attention over keys, and without the head.
        head_flops: of a token whose logits are wanted.
        state_bytes: of the recurrent states of a sequence.
        attention: by kind.

    PlanError for what is negative or no number, and for more experts a token than there are.
    """

    weight_bytes: float
    expert_bytes: float = 0.0
    num_experts: int = 0
    experts_per_token: int = 0
    token_flops: float
    head_flops: float
    state_bytes: float = 0.0
    attention: tuple[Attention, ...] = ()

    def __post_init__(self) -> None:
        for name in ("weight_bytes", "expert_bytes", "token_flops", "head_flops", "state_bytes"):
            if not 0 <= getattr(self, name) < math.inf:
                raise PlanError(
                    f"{name} of a model's work is a number that is not negative, not {getattr(self, name)!r}"
                )
        if not 0 <= self.experts_per_token <= self.num_experts:
            raise PlanError(f"a token cannot choose {self.experts_per_token} of {self.num_experts} experts")

    def seconds(self, forward: Forward, device: Device) -> float:
        """How long a forward takes on a device, every part of it at whichever bound is the slower."""
        past, num_rows = forward.starts, len(forward.starts)
        new = forward.num_new_tokens if isinstance(forward.num_new_tokens, int) else np.array(forward.num_new_tokens)
        num_tokens = _num_tokens(forward)
        flops = num_tokens * self.token_flops + int(np.count_nonzero(forward.samples)) * self.head_flops
        seconds = device.bound_s(flops, self.weight_bytes + self._expert_bytes(num_tokens))
        seconds += device.bound_s(0, 2 * num_rows * self.state_bytes)
        for kind in self.attention:
            num_keys = kind.num_keys(past, num_tokens)
            pairs = num_keys if num_tokens == num_rows else kind.num_pairs(past, new)
            num_bytes = kind.token_bytes * (num_keys + num_tokens)
            seconds += kind.num_layers * device.bound_s(kind.pair_flops * pairs, num_bytes)
        return seconds + device.forward_s

    def cache_bytes(self, forward: Forward) -> float:
        """Bytes of keys, values and states that a forward reads, each once."""
        num_tokens, num_bytes = _num_tokens(forward), len(forward.starts) * self.state_bytes
        for kind in self.attention:
            num_bytes += kind.num_layers * kind.token_bytes * kind.num_keys(forward.starts, num_tokens)
        return num_bytes

    def _expert_bytes(self, num_tokens: int) -> float:
        """Of the experts that `num_tokens` tokens choose, if each is as likely to be chosen as any other."""
        if not self.num_experts:
            return 0.0
        return self.expert_bytes * (1 - (1 - self.experts_per_token / self.num_experts) ** num_tokens)


def _num_tokens(forward: Forward) -> int:
    new = forward.num_new_tokens
    return new * len(forward.starts) if isinstance(new, int) else sum(new)
