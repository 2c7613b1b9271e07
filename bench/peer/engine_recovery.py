"""The engine's side of row 6: its server is killed, and started again by the other side."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from typing import Any

from bench.peer.engine_base import PeerEngine, Say

SMALL_TOKENS, LARGE_TOKENS = 256, 8192  # LMCache's chunk is 256 tokens
SMALL, LARGE = 160, 4
SMALL_SEED, LARGE_SEED, OTHER_SEED = 10_000, 20_000, 30_000
PROBE_EVERY_S = 0.5
HUNG_S = 20.0
QUIET_S = 2.0
INTO_A_COPY_S = 0.002
SHARE_PROBES = 60


@dataclass(slots=True)
class Stream:
    """Unrelated requests, one after the other; ``longest_s`` without a token of theirs."""

    name: str = ""
    number: int = 0
    tokens: int = 0
    last_s: float = 0.0
    longest_s: float = 0.0


@dataclass(slots=True)
class Probes:
    """Requests for prompts that were stored, each asked for once."""

    next: int = 0
    open: dict[str, float] = field(default_factory=dict)  # name -> when it began
    next_s: float = 0.0
    found: list[int] = field(default_factory=list)  # hit tokens, since the first hit
    back_s: float = 0.0  # since the kill
    failed: int = 0


class Recovery(PeerEngine):
    """One engine that goes on while its server dies and comes back."""

    def __init__(self, setup: dict[str, Any], say: Say) -> None:
        super().__init__(setup, say)
        self._armed = ""
        self._killed_s = 0.0
        self._stream, self._probes = Stream(), Probes()
        for hook, moment, due in (
            ("start_load_kv", "load", self.probe.loading),
            ("wait_for_save", "save", self.probe.saving),
        ):
            setattr(self.worker, hook, self._killing(getattr(self.worker, hook), moment, due))

    def _killing(self, method: Any, moment: str, due: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            if self._armed == moment and due():
                time.sleep(INTO_A_COPY_S)
                self._kill()
            return result

        return called

    def _kill(self) -> None:
        self._armed = ""
        os.kill(self.server_pid, signal.SIGKILL)
        self._killed_s = time.monotonic()

    def prepare(self) -> dict[str, Any]:
        """Store all prompts; one of them must hit. Raises RuntimeError when it does not."""
        for number in range(LARGE):
            self.begin(self.tokens(LARGE_SEED + number, LARGE_TOKENS + 1), 1)
            self.quiet()
        for number in range(SMALL):
            self.begin(self.tokens(SMALL_SEED + number, SMALL_TOKENS + 1), 1)
            if number % 8 == 7:
                self.quiet()
        self.begin(self.tokens(LARGE_SEED, LARGE_TOKENS + 1), 1)
        (done,) = self.engine.finish()
        if done.hit_tokens != LARGE_TOKENS:
            raise RuntimeError(f"{done.hit_tokens} of {LARGE_TOKENS} tokens hit before the kill")
        self.quiet()
        return {}

    def scenario(self, moment: str, observe_s: float) -> dict[str, Any]:
        """Kill the server ``idle``, during a ``load`` or a ``save``, and go on for a while.

        Says ``killed`` at that moment. Ends when hits are back and counted, else after
        ``observe_s``; ``back_s`` is then absent.
        """
        end_s = time.monotonic() + QUIET_S
        while time.monotonic() < end_s:
            self._step()
        usual_s, self._stream.longest_s = self._stream.longest_s, 0.0
        subject = self._strike(moment)
        self.say({"event": "killed"})
        died = ""
        try:
            self._observe(subject, observe_s)
        except Exception as error:  # noqa: BLE001 - an engine that dies of it is a result
            died = f"{type(error).__name__}: {error}"
        probes = self._probes
        now_s = time.monotonic()
        waiting = [now_s - began_s for began_s in probes.open.values()]
        if subject in self.engine._live:
            waiting.append(now_s - self._killed_s)
        hung = [one_s for one_s in waiting if one_s > HUNG_S]
        expected = SMALL_TOKENS * len(probes.found)
        result: dict[str, Any] = {
            "usual_gap_ms": usual_s * 1e3,
            "longest_gap_ms": self._stream.longest_s * 1e3,
            "hung": len(hung),
            "failed": probes.failed + self._failed(subject),
            "subject": self._subject(subject),
            "share": sum(probes.found) / expected if expected else 0.0,
            "engine_died": died,
        }
        return result | ({"back_s": probes.back_s} if probes.back_s else {})

    def _strike(self, moment: str) -> str:
        """Kill at the moment; return the request that was under way with the server."""
        subject = ""
        if moment == "idle":
            self._kill()
        else:
            self._armed = moment
            seed = LARGE_SEED + 1 if moment == "load" else OTHER_SEED
            subject = self.begin(self.tokens(seed, LARGE_TOKENS + 1), 2)
        end_s = time.monotonic() + HUNG_S
        while not self._killed_s:
            self._step()
            if time.monotonic() > end_s:
                raise RuntimeError(f"no {moment} began")
        return subject

    def _observe(self, subject: str, observe_s: float) -> None:
        end_s = self._killed_s + observe_s
        while time.monotonic() < end_s:
            self._step()
            self._look_back()
            counted = len(self._probes.found) >= SHARE_PROBES
            if counted and subject not in self.engine._live:
                return

    def _step(self) -> None:
        """Take one step; keep the unrelated requests going and note their pace."""
        stream, live = self._stream, self.engine._live
        if stream.name not in live:
            stream.number += 1
            stream.name = self.begin(self.tokens(OTHER_SEED + stream.number, 40), 400)
            stream.tokens = 0
        self.engine.step()
        now_s = time.monotonic()
        known = live.get(stream.name)
        tokens = len(known.output) if known is not None else -1  # -1: it ended with this step
        if tokens != stream.tokens:
            if stream.last_s:
                stream.longest_s = max(stream.longest_s, now_s - stream.last_s)
            stream.last_s, stream.tokens = now_s, tokens
        elif stream.last_s:
            stream.longest_s = max(stream.longest_s, now_s - stream.last_s)

    def _look_back(self) -> None:
        """Ask for the next stored prompt when it is time, and note what the last ones found."""
        probes, now_s = self._probes, time.monotonic()
        for live in [one for one in self.engine._ended if one.request.request_id in probes.open]:
            self.engine._ended.remove(live)
            del probes.open[live.request.request_id]
            probes.failed += live.finish != "length"
            if live.hit_tokens and not probes.back_s:
                probes.back_s = now_s - self._killed_s
            if probes.back_s:
                probes.found.append(live.hit_tokens)
                probes.next_s = now_s
        waiting = any(now_s - began_s < HUNG_S for began_s in probes.open.values())
        if now_s >= probes.next_s and not waiting and probes.next < SMALL:
            name = self.begin(self.tokens(SMALL_SEED + probes.next, SMALL_TOKENS + 1), 1)
            probes.open[name] = now_s
            probes.next += 1
            probes.next_s = now_s + PROBE_EVERY_S

    def _subject(self, subject: str) -> str:
        """Return how the request that was under way ended."""
        if not subject:
            return ""
        if subject in self.engine._live:
            return "hung"
        for live in self.engine._ended:
            if live.request.request_id == subject:
                return str(live.finish)
        return "unknown"

    def _failed(self, subject: str) -> int:
        return int(bool(subject) and self._subject(subject) not in ("hung", "length"))
