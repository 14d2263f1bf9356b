"""Events received by a driver, also across a controller restart."""

from __future__ import annotations

import pytest

from megarl.run import events
from megarl.run.events import Event, EventLog, MessageEvent


def add(log: EventLog, *texts: str) -> list[Event]:
    messages: list[Event] = [MessageEvent(text) for text in texts]
    for message in messages:
        log.add(message)
    return messages


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


def test_each_reader_receives_each_event_once_and_can_repeat_a_request() -> None:
    log = EventLog()
    first = add(log, *"abcde")
    received, cursor = log.since(0)
    assert received == first
    assert log.since(cursor) == ([], cursor)
    later = add(log, "f")
    assert log.since(cursor) == log.since(cursor)
    assert log.since(cursor)[0] == later
    assert log.since(0)[0] == first + later  # a second reader, after the first one has read everything


def test_the_log_keeps_the_newest_events_and_reports_how_many_it_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_EVENTS", 3)
    log = EventLog()
    _, cursor = log.since(0)
    newest = add(log, *"abcde")[2:]
    dropped = MessageEvent("2 earlier events are no longer available: the log keeps the newest 3")
    assert log.since(0)[0] == log.since(cursor)[0] == [dropped, *newest]
    _, cursor = log.since(cursor)
    later = add(log, "f")
    assert log.since(cursor)[0] == later
    for text in "abcdefghij":
        add(log, text)
        received, cursor = log.since(cursor)
    assert received == [MessageEvent("j")]


def test_a_reader_of_a_restarted_controller_is_told_what_the_new_log_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_EVENTS", 2)
    _, cursor = EventLog().since(0)
    after = EventLog()
    newest = add(after, *"abc")[1:]
    dropped = MessageEvent("1 earlier event is no longer available: the log keeps the newest 2")
    assert after.since(cursor)[0] == [dropped, *newest]
