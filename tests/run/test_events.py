"""Events received by a driver, also across a controller restart."""

from __future__ import annotations

from megarl.run.events import Event, EventLog, MessageEvent


def add(log: EventLog, *texts: str) -> list[Event]:
    messages: list[Event] = [MessageEvent(text) for text in texts]
    for message in messages:
        log.add(message)
    return messages


def test_each_event_is_received_once() -> None:
    log = EventLog()
    first = add(log, "a", "b")
    received, cursor = log.since(0)
    assert received == first
    assert log.since(cursor) == ([], cursor)
    later = add(log, "c")
    assert log.since(cursor)[0] == later


def test_a_lost_reply_can_be_requested_again() -> None:
    log = EventLog()
    add(log, "a")
    _, cursor = log.since(0)
    later = add(log, "b", "c")
    assert log.since(cursor) == log.since(cursor)
    assert log.since(cursor)[0] == later


def test_the_first_events_of_a_restarted_controller_are_received() -> None:
    before = EventLog()
    add(before, *"abcdef")
    _, cursor = before.since(0)
    after = EventLog()
    first = add(after, "the controller was lost", "resuming")
    received, cursor = after.since(cursor)
    assert received == first
    later = add(after, "step 3")
    assert after.since(cursor)[0] == later
