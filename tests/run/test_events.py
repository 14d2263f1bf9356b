"""What a driver hears, also of a controller that was restarted."""

from __future__ import annotations

from megarl.run.events import Event, EventLog, Note


def add(log: EventLog, *texts: str) -> list[Event]:
    notes: list[Event] = [Note(text) for text in texts]
    for note in notes:
        log.add(note)
    return notes


def test_each_event_is_heard_once() -> None:
    log = EventLog()
    first = add(log, "a", "b")
    heard, cursor = log.since(0)
    assert heard == first
    assert log.since(cursor) == ([], cursor)
    later = add(log, "c")
    assert log.since(cursor)[0] == later


def test_an_answer_that_was_lost_is_given_again() -> None:
    log = EventLog()
    add(log, "a")
    _, cursor = log.since(0)
    later = add(log, "b", "c")
    assert log.since(cursor) == log.since(cursor)
    assert log.since(cursor)[0] == later


def test_the_first_words_of_a_restarted_controller_are_heard() -> None:
    before = EventLog()
    add(before, *"abcdef")
    _, cursor = before.since(0)
    after = EventLog()
    first = add(after, "the controller was lost", "going on")
    heard, cursor = after.since(cursor)
    assert heard == first
    later = add(after, "step 3")
    assert after.since(cursor)[0] == later
