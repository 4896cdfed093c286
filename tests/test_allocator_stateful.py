"""Random lives of small arenas of every shape: more than 20,000 operations, everything checked after each."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from worlds import World

OPERATIONS: dict[str, int] = {  # and how often each is drawn
    "reserve": 36,
    "reserve_one": 6,
    "release": 24,
    "release_one": 4,
    "release_wrongly": 4,
    "open_lease": 8,
    "close_lease": 7,
    "poll": 4,
    "open_step": 3,
    "close_step": 4,
    "compact": 6,
    "move": 8,
}
NUM_OPERATIONS = 2_000  # of each case
CASES = [
    ("full", 3, ""),
    ("state", 1, ""),
    ("window", 5, ""),
    ("state_full", 1, ""),
    ("state_full", 7, ""),
    ("window_full", 2, ""),
    ("window_full", 4, "split"),
    ("two_windows", 3, ""),
    ("one_float", 1, ""),
    ("one_float", 2, "hints"),
    ("one_float", 3, ""),
    ("one_float", 6, ""),
    ("one_float", 2, "split"),
    ("two_floats", 1, ""),
    ("two_floats", 2, ""),
    ("two_floats", 3, "hints"),
    ("two_floats", 5, ""),
    ("two_floats", 2, "split"),
    ("three_floats", 1, "hints"),
    ("three_floats", 1, ""),
    ("three_floats", 2, ""),
    ("three_floats", 2, "split"),
    ("three_floats", 3, ""),
]


def live_through(world: World, seed: int, num_operations: int) -> None:
    rnd = random.Random(seed)
    done = 0
    while done < num_operations:
        (name,) = rnd.choices(list(OPERATIONS), list(OPERATIONS.values()))
        try:
            operate: Callable[[random.Random], bool] = getattr(world, name)
            if operate(rnd):
                world.verify()
                done += 1
        except Exception:
            print(f"operation {done} ({name}) of seed {seed}")
            raise
    assert done == num_operations


def test_the_cases_add_up_to_20_000_operations_over_every_shape() -> None:
    assert NUM_OPERATIONS * len(CASES) >= 20_000
    assert {shape for shape, _, _ in CASES} == {
        "full", "state", "window", "state_full", "window_full", "two_windows", "one_float", "two_floats", "three_floats"
    }  # fmt: skip


@pytest.mark.parametrize(("shape", "page_size", "frontiers"), CASES)
def test_everything_holds_after_every_operation(shape: str, page_size: int, frontiers: str) -> None:
    world = World(shape, page_size, frontiers)
    live_through(world, seed=CASES.index((shape, page_size, frontiers)), num_operations=NUM_OPERATIONS)
    print(world.outcomes)
    assert {"in_place", "refused", "relieved", "compact moved"} <= set(world.outcomes)
    if len(world.names) > 1 and frontiers != "split":
        assert world.outcomes["compact"] + world.outcomes["redistribute"] > 10


class Lives(RuleBasedStateMachine):
    """The same operations in an order that hypothesis chooses, so that a failure is shrunk to a few of them."""

    @initialize(case=st.sampled_from(CASES))
    def start(self, case: tuple[str, int, str]) -> None:
        self.world = World(*case, memory=1280)

    @rule(name=st.sampled_from(list(OPERATIONS)), rnd=st.randoms(use_true_random=False))
    def operate(self, name: str, rnd: random.Random) -> None:
        getattr(self.world, name)(rnd)

    @invariant()
    def everything_holds(self) -> None:
        self.world.verify()


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=40, stateful_step_count=30, deadline=None, derandomize=True, database=None)
