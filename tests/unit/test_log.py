"""Log events go to structlog where the application configured it, else to `logging`; stdout is never touched."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable

import pytest
import structlog
from structlog.testing import capture_logs

from kvxfer.log import EVENTS, LINES_MAX, RateLimiter, get_logger

CHILD = """
from kvxfer.log import get_logger
log = get_logger("kvxfer.test")
log.debug("engine.started", address="127.0.0.1:1")
log.info("engine.started", address="127.0.0.1:1")
log.warning("engine.address_unsure", address="127.0.0.1", count=3)
"""


def run_child(before: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", before + CHILD], capture_output=True, text=True, check=True)


@pytest.mark.slow
@pytest.mark.parametrize("before", ["", "import structlog\n"], ids=["structlog not imported", "structlog imported"])
def test_unconfigured_nothing_on_stdout_and_only_warnings_on_stderr(before: str) -> None:
    done = run_child(before)

    assert done.stdout == ""
    assert done.stderr == "kvxfer: warning: engine.address_unsure address='127.0.0.1' count=3\n"


@pytest.mark.slow
def test_logging_shows_all_levels_once_the_application_asks() -> None:
    done = run_child("import logging; logging.basicConfig(level=logging.DEBUG)\n")

    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["DEBUG", "INFO", "WARNING"]
    assert "kvxfer: warning" not in done.stderr  # the handler has said both


@pytest.mark.slow
def test_configured_structlog_gets_every_event() -> None:
    done = run_child("import structlog; structlog.configure(processors=[structlog.processors.JSONRenderer()])\n")

    assert len(done.stdout.splitlines()) == 3
    assert done.stderr == ""


def test_fields_reach_structlog_as_they_are() -> None:
    with capture_logs() as events:
        get_logger("kvxfer.test").error("loop.handler_failed", handler="x", count=2)

    assert events == [{"event": "loop.handler_failed", "log_level": "error", "handler": "x", "count": 2}]


def test_a_logger_made_before_structlog_is_configured_follows_the_configuration() -> None:
    logger = get_logger("kvxfer.test")
    logger.debug("engine.started")

    for _ in range(2):
        with capture_logs() as events:
            logger.info("engine.closed")
        assert [event["event"] for event in events] == ["engine.closed"]


def test_event_names_are_noun_and_past_tense_verb_and_explained() -> None:
    for name, meaning in EVENTS.items():
        noun, dot, verb = name.partition(".")
        assert noun.isidentifier(), name
        assert dot, name
        assert verb.isidentifier(), name
        assert meaning, name


def test_limited_events_are_listed() -> None:
    assert set(LINES_MAX) <= set(EVENTS)


def test_first_lines_pass_and_the_next_interval_tells_how_many_did_not() -> None:
    limiter = RateLimiter(10.0)

    first = [limiter.admit("stranger", 3, now=i / 100) for i in range(1000)]
    later = [limiter.admit("stranger", 3, now=20.0 + i) for i in range(4)]

    assert first == [0, 0, 0, *[None] * 997]
    assert later == [997, 0, 0, None]
    assert limiter.admit("stranger", 3, now=30.5) == 1


def test_kinds_are_counted_apart_and_what_is_quiet_is_never_left_out() -> None:
    limiter = RateLimiter(10.0)

    assert [limiter.admit(("broken", rail), 1, now=0.0) for rail in "abab"] == [0, 0, None, None]
    assert [limiter.admit("seldom", 1, now=11.0 * i) for i in range(5)] == [0] * 5


def test_ever_new_kinds_take_no_memory_for_ever() -> None:
    limiter = RateLimiter(10.0)
    for number in range(100_000):
        limiter.admit(number, 1, now=0.0)

    assert len(limiter._seen) <= 1024


@pytest.mark.parametrize("where", ["logging", "structlog"])
def test_flood_of_one_event_is_a_few_lines_and_a_count(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("kvxfer.log.time.monotonic", lambda: now)
    logger, lines = get_logger("kvxfer.test"), []
    if where == "structlog":
        structlog.configure(processors=[lambda _, __, event: lines.append(event) or str(event)])
    else:
        monkeypatch.setattr(logger._plain, "_log", lambda level, text, arguments: lines.append(text % arguments))

    for _ in range(1000):
        logger.warning("listener.stranger", peer="192.0.2.1:1")
    assert len(lines) == 5
    now += 10.0
    logger.warning("listener.stranger", peer="192.0.2.1:1")
    logger.warning("engine.address_unsure", address="192.0.2.1")

    assert "left_out_count" in str(lines[5])
    assert "995" in str(lines[5])
    assert len(lines) == 7


def count_calls(work: Callable[[], None]) -> int:
    """Return how many functions in Python `work` calls, itself included."""
    calls = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, argument: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        work()
    finally:
        sys.setprofile(before)
    return len(calls)


@pytest.mark.parametrize("where", ["logging", "structlog"])
def test_a_filtered_call_does_next_to_nothing(where: str) -> None:
    """It looks whether anybody listens (0.6 us), and makes no text and no record."""
    if where == "structlog":
        structlog.configure(
            wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING), cache_logger_on_first_use=True
        )
    logger = get_logger("kvxfer.test")

    def call() -> None:
        logger.debug("engine.started", address="127.0.0.1:1", port=1)

    call()
    assert count_calls(call) <= 10
