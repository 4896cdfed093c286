"""Layers of reference sliding windows: the tokens of the prompt are seen by all that follow, and those by a window.

Owns how long the prompt is, as Unlimited-OCR (`modeling_unlimited_ocr.py`) tells and asks it. An arena keeps what lives
equally long together, and a prompt ends where it does in each sequence, so all tokens are kept; the mask of the model
shows a query the prompt and the window.
"""

from __future__ import annotations

from torch_uma.errors import SequenceError
from torch_uma.integrations.transformers.given import GivenStep
from torch_uma.integrations.transformers.steps import OwnSteps

REFERENCE = "reference_sliding_attention"
"""The kind of such layers."""


class Prompt:
    """How many tokens of the rows are their prompt: to be mixed into a layer."""

    _steps: GivenStep | OwnSteps
    _num_tokens: int | None = None  # of the prompt that the rows begin with
    _num_expected: int | None = None  # of the one that is to come

    @property
    def prefill_length(self) -> int | None:
        """Tokens of the prompt, None before the first. SequenceError in a step that was not told."""
        if self._num_expected is not None:
            return self._num_expected
        if isinstance(self._steps, GivenStep):
            raise SequenceError(
                "a query sees the prompt and a window, and this step does not know how long the prompts of its "
                "sequences are; call layer.set_prefill_length(num_tokens) of all cache.layers before the forward"
            )
        return self._num_tokens if self._steps.has_tokens() else None

    def set_prefill_length(self, prefill_length: int) -> None:
        """Says how long the prompt is, which is otherwise what the first forward takes. Ignored behind a first token.

        In a step of `pool.step` it is never ignored.
        """
        if isinstance(self._steps, GivenStep) or not self._steps.has_tokens():
            self._num_expected = prefill_length

    def begin(self, is_fresh: bool, num_new_tokens: int) -> None:
        """Notes what the first forward over the rows takes."""
        if is_fresh and isinstance(self._steps, OwnSteps):
            self._num_tokens = num_new_tokens if self._num_expected is None else self._num_expected
            self._num_expected = None

    def follow(self, other: Prompt) -> None:
        """Takes over what a layer whose rows were forked knows."""
        self._num_tokens, self._num_expected = other._num_tokens, other._num_expected
