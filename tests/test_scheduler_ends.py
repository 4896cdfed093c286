"""How requests and rounds end: given up, completed in any order, failed; one behaviour a test."""

from __future__ import annotations

import pytest
from scheduling import CHEAP_HOST, Loop, known, launch, live_pages, scheduler_of

from torch_uma.errors import SequenceError

# Given up


def test_a_waiting_request_is_cancelled() -> None:
    scheduler = scheduler_of(max_running=1)
    first, second, third = (scheduler.submit(5, 5) for _ in range(3))
    scheduler.cancel(second)
    scheduler.cancel(second)
    assert second.state == "cancelled" and scheduler.waiting == (first, third) and len(scheduler) == 2
    loop = Loop(scheduler)
    loop.run(50)
    assert loop.finished == [first, third] and scheduler.stats().cancelled == 1


def test_a_request_is_cancelled_in_the_middle_of_its_prompt() -> None:
    scheduler = scheduler_of(step_tokens=4)
    request = scheduler.submit(20, 5)
    Loop(scheduler).round()
    assert request.sequence is not None and request.sequence.length == 4
    scheduler.cancel(request)
    assert live_pages(scheduler.pool) == 5
    assert not scheduler.schedule() and live_pages(scheduler.pool) == 0 and not scheduler


def test_a_decoding_request_is_cancelled() -> None:
    scheduler = scheduler_of()
    first, second = scheduler.submit(4, 20), scheduler.submit(5, 20)
    loop = Loop(scheduler)
    loop.round(), loop.round()
    scheduler.cancel(first)
    assert scheduler.running == (second,)
    (forward,) = loop.round().forwards
    assert forward.requests == (second,) and first.sequence is None
    loop.run(50)


def test_a_request_is_cancelled_between_schedule_and_launch() -> None:
    scheduler = scheduler_of()
    first, second = scheduler.submit(4, 20), scheduler.submit(5, 20)
    round = scheduler.schedule()
    scheduler.cancel(first)
    assert first.sequence is not None  # its forward can be run
    launch(scheduler.pool, round)
    assert scheduler.complete(round, [first]) == []
    assert first.state == "cancelled"
    Loop(scheduler).round()
    assert first.sequence is None and scheduler.running == (second,)


def test_a_request_is_cancelled_with_a_token_in_flight() -> None:
    scheduler = scheduler_of()
    request = scheduler.submit(4, 20)
    first = scheduler.schedule()
    launch(scheduler.pool, first)
    second = scheduler.schedule()
    launch(scheduler.pool, second)
    scheduler.cancel(request)
    third = scheduler.schedule()
    assert not third and live_pages(scheduler.pool) == 0
    for round in (first, second, third):
        assert scheduler.complete(round) == []
    assert request.num_new_tokens == 2


def test_an_offloaded_request_is_cancelled() -> None:
    scheduler = scheduler_of(headroom_steps=1, host_memory="1MiB", costs=CHEAP_HOST)
    first, second = scheduler.submit(28, 30), scheduler.submit(28, 30)
    loop = Loop(scheduler)
    while second.state != "offloaded":
        loop.round()
    scheduler.cancel(second)
    loop.round()
    assert second.offloaded is None and scheduler.stats().host_bytes == 0 and scheduler.waiting == ()
    loop.run(50)
    assert loop.finished == [first]


def test_a_request_is_cancelled_after_it_was_given_its_last_token() -> None:
    scheduler = scheduler_of()
    request = scheduler.submit(4, 1)
    round = scheduler.schedule()
    launch(scheduler.pool, round)
    scheduler.schedule()  # lets go of it
    scheduler.cancel(request)
    assert len(scheduler) == 0 and scheduler.complete(round) == [] and request.state == "cancelled"
    assert not scheduler.schedule() and scheduler.stats().finished == 0


def test_all_are_cancelled_at_once_and_others_may_follow() -> None:
    scheduler = scheduler_of(max_running=2, step_tokens=6)
    requests = [scheduler.submit(4, 10) for _ in range(4)]
    loop = Loop(scheduler)
    loop.round(), loop.round()
    scheduler.close()
    assert {request.state for request in requests} == {"cancelled"} and len(scheduler) == 0
    assert live_pages(scheduler.pool) == 0 and scheduler.running == scheduler.waiting == ()
    another = scheduler.submit(4, 3)
    loop.run(20)
    assert loop.finished == [another]


# What is known


def test_rounds_are_completed_in_order_and_once() -> None:
    scheduler = scheduler_of()
    scheduler.submit(4, 20)
    rounds = []
    for _ in range(3):
        rounds.append(scheduler.schedule())
        launch(scheduler.pool, rounds[-1])
    before = known(scheduler)
    for wrong in (rounds[1], rounds[2]):
        with pytest.raises(SequenceError, match="0 of 3 are, in order"):
            scheduler.complete(wrong)
    assert known(scheduler) == before
    scheduler.complete(rounds[0])
    with pytest.raises(SequenceError, match="1 of 3 are"):
        scheduler.complete(rounds[0])
    scheduler.complete(rounds[1])
    scheduler.complete(rounds[2])
    with pytest.raises(SequenceError, match="3 of 3 are"):
        scheduler.complete(rounds[2])


def test_what_is_of_another_scheduler_is_refused() -> None:
    scheduler, other = scheduler_of(), scheduler_of()
    own, foreign = scheduler.submit(4, 20), other.submit(4, 20)
    round, foreign_round = scheduler.schedule(), other.schedule()
    launch(scheduler.pool, round)
    before = known(scheduler)
    for act in (
        lambda: scheduler.cancel(foreign),
        lambda: scheduler.complete(round, [foreign]),
        lambda: scheduler.complete(foreign_round),
        lambda: scheduler.abandon(foreign_round),
        lambda: scheduler.cancel("own"),  # type: ignore[arg-type]
    ):
        with pytest.raises(SequenceError, match="not a request of this scheduler"):
            act()
    assert known(scheduler) == before
    assert scheduler.complete(round, [own]) == [own]


def test_who_has_got_no_token_cannot_have_ended() -> None:
    scheduler = scheduler_of(memory=4096, step_tokens=14)
    first, second, third = scheduler.submit(4, 20), scheduler.submit(15, 20), scheduler.submit(3, 20)
    rounds = []
    for _ in range(2):
        rounds.append(scheduler.schedule())
        launch(scheduler.pool, rounds[-1])
    assert (first.num_new_tokens, second.num_new_tokens, third.num_new_tokens) == (2, 1, 1)
    before = known(scheduler)
    for request in (second, third):  # their tokens are of the second round
        with pytest.raises(SequenceError, match="got no token until round 1"):
            scheduler.complete(rounds[0], [first, request])
        assert known(scheduler) == before
    scheduler.complete(rounds[0])
    assert set(scheduler.complete(rounds[1], [second, first])) == {first, second}
    assert scheduler.complete(scheduler.schedule()) == []


def test_who_has_ended_already_is_not_named_again() -> None:
    scheduler = scheduler_of()
    first, second = scheduler.submit(4, 2), scheduler.submit(4, 20)
    for expected in ([second], [first]):
        round = scheduler.schedule()
        launch(scheduler.pool, round)
        assert scheduler.complete(round, [second, second]) == expected
    assert scheduler.stats().finished == 2 and second.num_new_tokens == 1


def test_what_was_in_flight_when_a_request_ended_is_not_counted() -> None:
    scheduler = scheduler_of()
    request, other = scheduler.submit(4, 20), scheduler.submit(4, 20)
    rounds = []
    for _ in range(3):
        rounds.append(scheduler.schedule())
        launch(scheduler.pool, rounds[-1])
    assert request.num_new_tokens == 3
    assert scheduler.complete(rounds[0], [request]) == [request]
    assert request.num_new_tokens == 1 and request.state == "finished"
    rounds.append(scheduler.schedule())
    assert request.sequence is None and rounds[3].forwards[0].requests == (other,)
    launch(scheduler.pool, rounds[3])
    for round in rounds[1:]:
        assert scheduler.complete(round, [request]) == []
    assert other.num_new_tokens == 4


def test_a_retracted_request_may_have_ended_with_its_token_in_flight() -> None:
    for host_memory, state in ((0, "waiting"), ("1MiB", "offloaded")):
        scheduler = scheduler_of(max_running=1, host_memory=host_memory, costs=CHEAP_HOST)
        request = scheduler.submit(4, 20)
        first = scheduler.schedule()
        launch(scheduler.pool, first)
        urgent = scheduler.submit(4, 2, priority=1)
        second = scheduler.schedule()
        assert request.state == state and second.admitted == (urgent,)
        launch(scheduler.pool, second)
        assert scheduler.complete(first, [request]) == [request]
        assert scheduler.waiting == () and request.num_new_tokens == 1
        scheduler.complete(second)
        third = scheduler.schedule()
        launch(scheduler.pool, third)
        assert scheduler.complete(third) == [urgent] and not scheduler.schedule()
        assert scheduler.stats().host_bytes == 0


def test_a_retracted_request_waits_until_its_last_token_is_known() -> None:
    scheduler = scheduler_of(max_running=1)
    request = scheduler.submit(4, 20)
    first = scheduler.schedule()
    launch(scheduler.pool, first)
    urgent = scheduler.submit(4, 1, priority=1)
    second = scheduler.schedule()
    assert second.dropped == (request,) and second.admitted == (urgent,)
    launch(scheduler.pool, second)
    third = scheduler.schedule()
    assert not third and scheduler.waiting == (request,)
    scheduler.complete(first)
    fourth = scheduler.schedule()
    assert fourth.admitted == (request,) and fourth.forwards[0].counts == [5]
    launch(scheduler.pool, fourth)
    for round in (second, third, fourth):
        scheduler.complete(round)
    assert urgent.state == "finished" and request.num_new_tokens == 2


# What went wrong


def test_a_round_that_was_not_run_is_not_followed() -> None:
    scheduler = scheduler_of()
    last, other = scheduler.submit(4, 2), scheduler.submit(4, 20)
    Loop(scheduler).round()
    round = scheduler.schedule()
    assert round.last_tokens == (last,)
    with pytest.raises(SequenceError, match="run the forwards of a round before schedule"):
        scheduler.schedule()
    scheduler.abandon(round)  # as the message says
    loop = Loop(scheduler)
    loop.known = {last: 1, other: 1}
    loop.run(30)
    assert set(loop.finished) == {last, other}


@pytest.mark.parametrize("kinds", ["full", "hybrid"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_run", [0, 1, 2])
def test_a_round_is_abandoned(kinds: str, overlap: bool, num_run: int) -> None:
    scheduler = scheduler_of(kinds, memory=1 << 13, step_tokens=20)
    first, second, third = scheduler.submit(4, 3), scheduler.submit(4, 9), scheduler.submit(60, 9)
    loop = Loop(scheduler, overlap=overlap)
    loop.round()
    loop.round()
    round = scheduler.schedule()
    prompts, decode = round.forwards
    assert not prompts.is_decode and decode.is_decode and round.last_tokens == (first,)
    for forward in round.forwards[:num_run]:
        scheduler.pool.begin(forward.batch, forward.num_new_tokens).commit()
    started = third.sequence
    scheduler.abandon(round)
    assert (first.num_new_tokens, second.num_new_tokens, third.num_new_tokens) == (2, 2, 0)
    assert first.state == second.state == "waiting" and third.sequence is started is not None
    with pytest.raises(SequenceError, match="is not the last one"):
        scheduler.abandon(round)
    loop.run(60)
    assert set(loop.finished) == {first, second, third} and live_pages(scheduler.pool) == 0
    assert scheduler.stats().recomputed_tokens >= 10


def test_a_torn_state_is_computed_anew() -> None:
    scheduler = scheduler_of("hybrid", memory=1 << 13, step_tokens=20)
    prompt, short = scheduler.submit(50, 3), scheduler.submit(2, 3)
    loop = Loop(scheduler)
    loop.round()
    round = scheduler.schedule()
    step = scheduler.pool.begin(round.forwards[0].batch, round.forwards[0].num_new_tokens)
    step.state_touched = True
    step.abort()
    scheduler.abandon(round)
    assert prompt.state == "waiting" and prompt.sequence is None  # though it was in the middle of its prompt
    loop.run(60)
    assert set(loop.finished) == {prompt, short}


def test_a_cancelled_request_is_in_a_round_that_is_abandoned() -> None:
    scheduler = scheduler_of()
    first, second = scheduler.submit(4, 9), scheduler.submit(4, 9)
    loop = Loop(scheduler)
    loop.round()
    round = scheduler.schedule()
    scheduler.cancel(first)
    scheduler.abandon(round)
    loop.run(60)
    assert loop.finished == [second] and first.state == "cancelled"


def test_a_completed_round_cannot_be_abandoned() -> None:
    scheduler = scheduler_of()
    scheduler.submit(4, 9)
    round = Loop(scheduler).round()
    before = known(scheduler)
    with pytest.raises(SequenceError, match="or it is completed"):
        scheduler.abandon(round)
    assert known(scheduler) == before


def test_host_memory_that_cannot_be_had_leaves_all_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = scheduler_of(headroom_steps=1, host_memory="1MiB", costs=CHEAP_HOST)
    first, second = scheduler.submit(28, 30), scheduler.submit(28, 30)
    loop = Loop(scheduler)

    def fail(sequence: object) -> None:
        raise MemoryError("no memory on the host")

    with monkeypatch.context() as patched:
        patched.setattr(scheduler.pool, "offload", fail)
        with pytest.raises(MemoryError):
            for _ in range(50):
                loop.round()
    assert first.state == second.state == "running" and second.num_retractions == 0
    scheduler.pool.check()
    loop.run(200)
    assert set(loop.finished) == {first, second} and second.num_retractions > 0


def test_an_empty_round_can_be_abandoned_as_it_can_be_completed() -> None:
    scheduler = scheduler_of()
    empty = scheduler.schedule()
    before = known(scheduler)
    scheduler.abandon(empty)
    assert not empty and scheduler.complete(empty) == [] and known(scheduler) == before
