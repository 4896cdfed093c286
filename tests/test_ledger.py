"""Leases by place: how they overlap, and when they end."""

from __future__ import annotations

import numpy as np
import pytest
from worlds import Flag

from torch_uma.errors import LeaseError
from torch_uma.ledger import Lease, Ledger


class Books:
    """A ledger over ten places and what it reported."""

    def __init__(self) -> None:
        self.unleased: list[list[int]] = []
        self.ledger = Ledger(10, lambda places: self.unleased.append(places.tolist()))

    def open(self, *places: int, user: str = "test") -> Lease:
        return self.ledger.open(np.array(places, np.int64) + 100, np.array(places, np.int64), user)

    def assert_counts(self, **counts: int) -> None:
        expected = [counts.get(f"at_{place}", 0) for place in range(10)]
        assert self.ledger.counts.tolist() == expected


def test_a_lease_remembers_who_and_what() -> None:
    books = Books()
    books.ledger.epoch = 4
    lease = books.open(7, 2, 7, user="a host copy")
    assert (lease.user, lease.epoch, lease.is_open) == ("a host copy", 4, True)
    assert lease.pages.tolist() == [107, 102, 107] and lease.places.tolist() == [2, 7]
    books.assert_counts(at_2=1, at_7=1)
    assert books.ledger.leases == {lease} and repr(lease) == "Lease('a host copy', 2 pages, open)"
    lease.close()
    assert repr(lease) == "Lease('a host copy', 2 pages, closed)"


def test_a_page_is_free_when_its_last_lease_ends() -> None:
    books = Books()
    first, second = books.open(1, 2, 3), books.open(2, 3, 4)
    books.assert_counts(at_1=1, at_2=2, at_3=2, at_4=1)
    first.close()
    assert books.unleased == [[1]] and books.ledger.leases == {second} and not first.is_open
    books.assert_counts(at_2=1, at_3=1, at_4=1)
    second.close()
    assert books.unleased == [[1], [2, 3, 4]] and not books.ledger.leases
    books.assert_counts()


def test_a_lease_ends_once() -> None:
    books = Books()
    lease = books.open(1, user="a copy")
    lease.close()
    for event in (None, Flag()):
        with pytest.raises(
            LeaseError, match=r"Lease\('a copy', 1 pages, closed\) was closed before; a lease ends once"
        ):
            lease.close(event)
    assert books.unleased == [[1]] and books.ledger.poll() == 0
    waiting = books.open(2)
    waiting.close(Flag())
    for event in (None, Flag(True)):
        with pytest.raises(LeaseError, match="was closed before"):
            waiting.close(event)
    assert books.ledger.poll() == 0
    books.assert_counts(at_2=1)


def test_a_lease_of_nothing_is_refused() -> None:
    books = Books()
    with pytest.raises(LeaseError, match="'a copy' asked for a lease of no pages; name at least one"):
        books.open(user="a copy")
    assert not books.ledger.leases
    books.assert_counts()


def test_an_event_is_asked_in_poll_alone() -> None:
    books = Books()
    flag = Flag(True)
    lease = books.open(1, 5)
    lease.close(flag)
    assert not lease.is_open and books.ledger.leases == {lease} and books.unleased == []
    assert books.ledger.pinned_span(0, 10) == (1, 6) and books.ledger.leased(0, 10).tolist() == [1, 5]
    assert flag.num_queries == 0
    assert books.ledger.poll() == 1
    assert flag.num_queries == 1 and books.unleased == [[1, 5]] and not books.ledger.leases
    assert books.ledger.poll() == 0
    assert flag.num_queries == 1


def test_leases_end_in_the_order_in_which_they_were_closed() -> None:
    books = Books()
    flags = [Flag() for _ in range(3)]
    leases = [books.open(place) for place in (1, 2, 3)]
    for k in (2, 0, 1):
        leases[k].close(flags[k])
    assert books.ledger.poll() == 0 and books.unleased == []
    flags[0].has_passed = flags[2].has_passed = True
    assert books.ledger.poll() == 2
    assert books.unleased == [[3], [1]] and books.ledger.leases == {leases[1]}
    flags[1].has_passed = True
    assert books.ledger.poll() == 1
    assert books.unleased == [[3], [1], [2]]


def test_one_event_may_end_several_leases() -> None:
    books = Books()
    flag = Flag()
    for lease in (books.open(1, 2), books.open(2, 3)):
        lease.close(flag)
    assert books.ledger.poll() == 0
    flag.has_passed = True
    assert books.ledger.poll() == 2
    assert books.unleased == [[1], [2, 3]]


def test_a_lease_that_is_closed_while_another_ends_is_not_lost() -> None:
    late = []
    ledger = Ledger(10, lambda places: late and late.pop().close(Flag(True)))
    first, second = (ledger.open(np.array([place]), np.array([place]), "test") for place in (1, 2))
    late.append(second)
    first.close(Flag(True))
    assert ledger.poll() == 1 and ledger.leases == {second}
    assert ledger.poll() == 1 and not ledger.leases


def test_an_event_that_fails_ends_nothing() -> None:
    class Broken(Flag):
        def query(self) -> bool:
            raise RuntimeError("device lost")

    books = Books()
    good, bad = books.open(1), books.open(2)
    good.close(Flag(True))
    bad.close(Broken())
    with pytest.raises(RuntimeError, match="device lost"):
        books.ledger.poll()
    assert books.ledger.leases == {good, bad} and books.unleased == []


@pytest.mark.parametrize(
    ("start", "end", "span", "places"),
    [
        (0, 10, (1, 9), [1, 2, 5, 8]),
        (1, 9, (1, 9), [1, 2, 5, 8]),
        (2, 8, (2, 6), [2, 5]),
        (3, 6, (5, 6), [5]),
        (5, 9, (5, 9), [5, 8]),
        (3, 5, None, []),
        (6, 8, None, []),
        (9, 10, None, []),
        (5, 5, None, []),
    ],
)
def test_leased_places_of_a_range(start: int, end: int, span: tuple[int, int] | None, places: list[int]) -> None:
    books = Books()
    books.open(5, 1)
    books.open(2, 5, 8)
    assert books.ledger.pinned_span(start, end) == span
    assert books.ledger.leased(start, end).tolist() == places


def test_without_leases_nothing_is_pinned() -> None:
    books = Books()
    assert books.ledger.pinned_span(0, 10) is None and books.ledger.leased(0, 10).tolist() == []
    assert books.ledger.leased(0, 10).dtype == np.int64 and books.ledger.epoch == 0
