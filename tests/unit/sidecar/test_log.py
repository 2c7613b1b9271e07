"""Logs: one event per line, bounded, without secrets."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import structlog
from kvferry_sidecar.observe import log


@pytest.fixture(autouse=True)
def restore():
    before = structlog.get_config()
    yield
    structlog.configure(**before)


class Written(io.StringIO):
    """What the writer's thread wrote; asking waits for it."""

    lines: log.Lines

    def getvalue(self):
        assert self.lines.flush(90.0)
        return super().getvalue()


def lines(style="json", level="info"):
    stream = Written()
    stream.lines = log.configure(level, style, stream)
    return stream


def test_json_lines():
    stream = lines()
    log.get_logger("attach").info("half attached", rank=1, request="r" * 1000, epoch=b"\x01\xff")
    (line,) = stream.getvalue().splitlines()
    event = json.loads(line)
    assert (event["event"], event["part"], event["level"]) == ("half attached", "attach", "info")
    assert event["rank"] == 1
    assert event["epoch"] == "01ff"
    assert len(event["request"]) == log.text_chars_max
    assert event["timestamp"].endswith("Z")


def test_a_level_hides_what_is_below_it():
    stream = lines(level="warning")
    logger = log.get_logger("loop")
    logger.info("not this")
    logger.warning("this")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["this"]


def test_a_client_cannot_forge_a_line():
    stream = lines("console")
    log.get_logger("attach").info("refused", engine="a\nb\x1b[31m\r")
    assert len(stream.getvalue().splitlines()) == 1
    assert "\x1b[31m" not in stream.getvalue()
    assert "a?b?[31m?" in stream.getvalue()


@pytest.mark.parametrize("name", ["cache_salt", "life_nonce", "prompt", "token_ids", "password"])
def test_secrets_are_not_logged(name):
    stream = lines()
    log.get_logger("job").info("event", **{name: "secret-value"})
    assert "secret-value" not in stream.getvalue()


def test_counts_of_tokens_are_logged():
    stream = lines()
    log.get_logger("job").info("event", hit_tokens=64)
    assert json.loads(stream.getvalue())["hit_tokens"] == 64


@pytest.mark.parametrize("style", ["json", "console"])
def test_an_exception_is_logged_with_its_traceback(style):
    stream = lines(style)
    try:
        int("why")
    except ValueError:
        log.get_logger("loop").exception("handler failed")
    assert "why" in stream.getvalue()
    assert "test_log" in stream.getvalue()


def test_long_bytes_are_cut():
    stream = lines()
    log.get_logger("job").info("event", body=bytes(1000))
    assert len(json.loads(stream.getvalue())["body"]) == log.text_chars_max


def test_loggers_made_before_follow_the_configuration():
    logger = log.get_logger("early")
    stream = lines()
    logger.info("late")
    assert json.loads(stream.getvalue())["part"] == "early"


# --- a stream that does not take lines ---------------------------------------------------------


def events(text):
    return [json.loads(line) for line in text.splitlines()]


def test_a_stream_that_fails_never_reaches_who_logs():
    class Full(Written):
        full = True

        def write(self, text):
            if self.full:
                raise OSError(28, "No space left on device")
            return super().write(text)

    stream = Full()
    stream.lines = log.configure("info", "json", stream)
    logger = log.get_logger("loop")
    for _ in range(3):
        logger.error("not written")
    assert stream.lines.flush(90.0)
    assert stream.lines.lost == 3
    stream.full = False
    logger.info("written")
    logger.info("again")
    told, *rest = events(stream.getvalue())
    assert (told["event"], told["lines"], told["level"]) == ("log lines were lost", 3, "warning")
    assert [event["event"] for event in rest] == ["written", "again"]


def test_a_full_device_and_a_closed_stream_are_survived():
    with Path("/dev/full").open("w") as full:
        written = log.configure("info", "console", full)
        log.get_logger("loop").info("not written")
        assert written.flush(90.0)
    log.get_logger("loop").info("the stream is closed")
    assert written.flush(90.0)
    assert written.lost == 2


def test_a_process_without_stderr_logs_nothing(monkeypatch):
    monkeypatch.setattr("sys.stderr", None)
    written = log.configure("info", "console")
    log.get_logger("loop").info("not written")
    assert written.flush(90.0)
    assert written.lost == 1


@pytest.mark.parametrize("blocking", [True, False])
def test_a_reader_that_stopped_reading_holds_nobody_up(blocking):
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, blocking)
    text = b""
    with os.fdopen(read_fd, "rb", buffering=0) as reader, os.fdopen(write_fd, "w") as stream:
        written = log.configure("info", "json", stream)
        logger = log.get_logger("loop")
        count = 2 * log.log_lines_max
        for number in range(count):  # would wait for ever
            logger.info("line", number=number, filler="x" * 200)
        assert not written.flush(0.05)
        assert written.lost > 0
        os.set_blocking(read_fd, False)
        end_s = time.monotonic() + 90
        while not written.flush(0.01):
            assert time.monotonic() < end_s
            text += reader.read() or b""
        logger.info("last")
        assert written.flush(90.0)
        with contextlib.suppress(BlockingIOError):
            text += reader.read() or b""
    seen = events(text.decode())
    lost = sum(event["lines"] for event in seen if event["event"] == "log lines were lost")
    assert lost == written.lost
    assert sum(event["event"] == "line" for event in seen) + lost == count
    assert seen[-1]["event"] == "last"


def test_a_throttle_counts_what_it_holds_back():
    throttle = log.Throttle(1.0)
    assert [throttle.passes("a", now_s) for now_s in (5.0, 5.1, 5.9)] == [0, None, None]
    assert throttle.passes("b", 5.9) == 0, "another kind"
    assert throttle.passes("a", 6.0) == 2
    assert throttle.passes("a", 7.5) == 0


@pytest.mark.parametrize("style", ["json", "console"])
def test_tracebacks_hold_no_local_variables(style: str) -> None:
    script = (
        "import structlog\n"
        "from kvferry_sidecar.observe import log\n"
        f"lines = log.configure('info', {style!r})\n"
        "def fail():\n"
        "    nonce = 'LOCAL' + 'SECRET'\n"
        "    raise RuntimeError(len(nonce))\n"
        "try:\n"
        "    fail()\n"
        "except RuntimeError:\n"
        "    structlog.get_logger().exception('it failed')\n"
        "lines.flush(90.0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert "it failed" in done.stderr, done
    assert "RuntimeError" in done.stderr
    assert "LOCALSECRET" not in done.stderr
