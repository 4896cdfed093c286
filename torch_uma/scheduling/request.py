"""One request as a scheduler knows it: how long it is and may get, and where it stands. Token ids are the loop's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch_uma.offload import Offloaded
    from torch_uma.sequence import Sequence

State = Literal["waiting", "running", "offloaded", "finished", "cancelled"]


class Clock:
    """Which round is the last that was scheduled; every request that decodes has had a token in each."""

    __slots__ = ("round",)

    def __init__(self) -> None:
        self.round = 0


class Request:
    """A prompt's length, how many tokens it may get, and where it stands; made by `scheduler.submit`.

    Attributes:
        num_prompt_tokens, max_new_tokens, priority: as submitted; a higher priority comes first.
        tag: the caller's own, not looked at.
        state: "waiting" (also once it was dropped), "running", "offloaded", "finished" or "cancelled".
        sequence: what holds its memory while it is running; None otherwise.
        num_retractions: how often it was taken out of memory.
        arrival: its place in the order of submission.
        rank: its place among all: the lower comes first. It never changes.
    """

    __slots__ = (
        "_decodes_from",
        "_num_tokens",
        "arrival",
        "clock",
        "last_round",
        "max_new_tokens",
        "num_prompt_tokens",
        "num_retractions",
        "num_to_run",
        "offloaded",
        "priority",
        "rank",
        "sequence",
        "state",
        "tag",
    )

    def __init__(
        self,
        clock: Clock,
        num_prompt_tokens: int,
        max_new_tokens: int,
        priority: int,
        tag: Any,
        rank: tuple[int, int],
    ) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.max_new_tokens = max_new_tokens
        self.priority = priority
        self.tag = tag
        self.rank = rank
        self.arrival = rank[1]
        self.state: State = "waiting"
        self.sequence: Sequence | None = None
        self.offloaded: Offloaded | None = None
        self.num_retractions = 0
        # For the scheduler: tokens to be run before it decodes; the last round that gave it a token.
        self.num_to_run = num_prompt_tokens
        self.last_round = 0
        self.clock = clock
        self._num_tokens = num_prompt_tokens
        self._decodes_from: int | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of its text: the prompt, and those that forwards were asked for, in flight included."""
        if self._decodes_from is None:
            return self._num_tokens
        return self._num_tokens + self.clock.round - self._decodes_from

    @property
    def num_new_tokens(self) -> int:
        """Of them, those behind the prompt."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def max_tokens(self) -> int:
        """Tokens of its text at most."""
        return self.num_prompt_tokens + self.max_new_tokens

    @property
    def is_done(self) -> bool:
        """Whether it is finished or cancelled."""
        return self.state in ("finished", "cancelled")

    # For the scheduler

    @property
    def is_decoding(self) -> bool:
        """Whether every round gives it a token."""
        return self._decodes_from is not None

    def sample(self) -> None:
        """A forward of the present round gives it a token behind its prompt, and every later round another one."""
        self._num_tokens += 1
        self._decodes_from = self.clock.round

    def decode(self) -> None:
        """From the present round on it gets a token a round."""
        self._decodes_from = self.clock.round - 1

    def hold(self) -> None:
        """No later round gives it a token, until it is told so again."""
        num_tokens = self.num_tokens
        if self._decodes_from is not None:
            self.last_round = self.clock.round
        self._num_tokens, self._decodes_from = num_tokens, None

    def num_tokens_until(self, round: int) -> int:
        """Tokens of its text that rounds until this one were asked for, which is the last that is completed or next."""
        last_round = self.clock.round if self.is_decoding else self.last_round
        return self.num_tokens - max(0, last_round - round)

    def take_back(self, num_tokens: int) -> None:
        """The text ends with so many tokens, whatever was asked for since."""
        assert self._decodes_from is None
        self._num_tokens = num_tokens

    def __repr__(self) -> str:
        return (
            f"Request({self.state}, prompt of {self.num_prompt_tokens}, {self.num_new_tokens} of {self.max_new_tokens} "
            f"new tokens, priority {self.priority})"
        )
