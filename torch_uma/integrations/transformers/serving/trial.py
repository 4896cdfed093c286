"""Whether a model gives sequences in one forward what it gives each alone: tried out with a few tokens.

Models that make masks or positions of their own may raise where sequences hold, or take, unequal numbers of tokens, or
count wrongly without a word. Neither shows in a config, so it is tried once for each model, in a small pool.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_uma.errors import OutOfMemory, PlanError, SequenceError, TorchUmaError
from torch_uma.integrations.transformers.cache import UnifiedCache
from torch_uma.integrations.transformers.made_for import config_of
from torch_uma.integrations.transformers.sizing import plan_for
from torch_uma.integrations.transformers.versions import cache_argument

if TYPE_CHECKING:
    from torch_uma.pool import CachePool
    from torch_uma.sequence import Sequence

_LENGTHS = (1, 17)
"""Of the two sequences: as unequal as they can be with few tokens."""

_MOST_DIFFERENCE = 0.01
"""Of logits that count as the same, as a share of how much they vary: rounding is far below, another place above it."""

_MOST_ROUNDED_DIFFERENCE = 0.5
"""The same in fewer bits than float32, where rounding may send a token to another expert."""

_COUNTS_COLUMNS = frozenset({"git", "roformer", "trocr"})
_COUNTS_BY_ITSELF = frozenset({"kosmos-2.5"})
"""Model types that were found in float32 to take positions and place tokens otherwise: fewer bits could hide it."""


@dataclass(frozen=True, kw_only=True)
class Together:
    """What sequences in one forward may be: `packed` take unequally many tokens, `uneven` hold unequally many."""

    packed: bool
    uneven: bool


_TRIED: weakref.WeakKeyDictionary[Any, dict[tuple[str | None, bool], Together]] = weakref.WeakKeyDictionary()
"""By model, its attention and whether it is in training."""


def try_together(model: Any, pool: CachePool) -> Together:
    """What a model over a pool allows; found by a few forwards the first time that it is asked with its attention.

    PlanError where the model cannot be run over one sequence either. Synchronises; leaves the pool alone.
    """
    config = config_of(pool)
    key = (None if config is None else config._attn_implementation, model.training)
    known = _TRIED.setdefault(model, {})
    if key not in known:
        with torch.no_grad(), _small(pool) as small:
            known[key] = _Trial(model, small).result(may_pack=_may_pack(pool))
    return known[key]


def _may_pack(pool: CachePool) -> bool:
    try:
        UnifiedCache._check_packed(pool, list(_LENGTHS))
    except SequenceError:
        return False
    return True


def _small(pool: CachePool) -> CachePool:
    """A pool for what such a pool holds, with room for the sequences of a trial."""
    made = type(pool)(plan_for(pool.plan.layers, 6, 32, True, 16, pool.device), max_sequences=6, device=pool.device)
    made.made_for = pool.made_for
    return made


class _Trial:
    def __init__(self, model: Any, pool: CachePool) -> None:
        self._model = model
        self._pool = pool
        self._argument = cache_argument(model.forward) or ""
        num_known = model.get_input_embeddings().num_embeddings
        is_exact = {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        self._most_difference = _MOST_DIFFERENCE if is_exact else _MOST_ROUNDED_DIFFERENCE
        self._text = [(7 + 5 * place) % num_known for place in range(max(_LENGTHS) + 2)]

    def result(self, *, may_pack: bool) -> Together:
        pair = [self._pool.add() for _ in _LENGTHS]
        try:
            own = torch.cat([self._own(length) for length in _LENGTHS])
            prompts = torch.cat([self._step({one: length}) for one, length in zip(pair, _LENGTHS, strict=True)])
            forks = [one.fork() for one in pair]
            nexts = torch.cat([self._step({one: 1}) for one in pair])
        except (TorchUmaError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            config = self._model.config
            raise PlanError(
                f"{config.model_type} with attn_implementation={config._attn_implementation!r} cannot be run over a "
                f"pool ({type(error).__name__}: {error}); if it runs with another implementation, set that"
            ) from error
        model_type = self._model.config.model_type
        if model_type in _COUNTS_BY_ITSELF or not self._is_near(prompts, own):
            raise PlanError(
                f"{model_type} gives a prompt other logits in a step of a pool than in generate(), "
                "which counts positions, or makes masks, in a way of this model's own; call that"
            )
        uneven = model_type not in _COUNTS_COLUMNS and self._is_same(lambda: self._step(dict.fromkeys(forks, 1)), nexts)
        packed = may_pack and self._is_same(self._packed, torch.cat([prompts, nexts[1:]]))
        return Together(packed=packed, uneven=uneven)

    def _packed(self) -> Tensor:
        """Both prompts, and then the next token of the longer one, of which the other takes one more."""
        short, long = self._pool.add(), self._pool.add()
        prompts = self._step(dict(zip((short, long), _LENGTHS, strict=True)))
        return torch.cat([prompts, self._step({short: 2, long: 1})[1:]])

    def _step(self, counts: Mapping[Sequence, int]) -> Tensor:
        """The logits [sequences, vocabulary] behind the next tokens of each."""
        pieces = [self._text[one.length : one.length + count] for one, count in counts.items()]
        is_packed = len(set(counts.values())) > 1
        ids = torch.tensor([sum(pieces, [])] if is_packed else pieces, device=self._pool.device)
        with self._pool.step(counts) as cache:
            logits: Tensor = self._model(
                ids, **{self._argument: cache}, use_cache=True, **cache.inputs()
            ).logits.float()
        if not is_packed:
            return logits[:, -1]
        return logits[0, torch.tensor(list(counts.values()), device=logits.device).cumsum(0) - 1]

    def _own(self, num_tokens: int) -> Tensor:
        """The logits [1, vocabulary] behind a prompt in `generate()`, over a cache that the model makes."""
        ids = torch.tensor([self._text[:num_tokens]], device=self._pool.device)
        made = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=1,
            do_sample=False,
            num_beams=1,
            num_return_sequences=1,
            output_logits=True,
            return_dict_in_generate=True,
        )
        logits: Tensor = made.logits[0]
        return logits

    def _is_same(self, forward: Callable[[], Tensor], expected: Tensor) -> bool:
        try:
            return self._is_near(forward(), expected)
        except (OutOfMemory, torch.OutOfMemoryError):
            raise
        except Exception:  # of whatever kind: it is a model's own code that cannot do it
            return False

    def _is_near(self, logits: Tensor, expected: Tensor) -> bool:
        """Whether logits [n, vocabulary] are those that are expected, but for rounding and, in training, dropout."""
        difference = (logits.float() - expected.float()).square().mean(-1).sqrt()
        return self._model.training or bool((difference <= self._most_difference * expected.float().std(-1)).all())
