"""Logs: one event per line, bounded, without secrets."""

from __future__ import annotations

import io
import json

import pytest
import structlog
from kvferry_sidecar.observe import log


@pytest.fixture(autouse=True)
def restore():
    yield
    structlog.reset_defaults()


def lines(style="json", level="info"):
    stream = io.StringIO()
    log.configure(level, style, stream)
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
