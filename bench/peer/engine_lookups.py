"""The engine's side of row 2: what one lookup costs, from arrival to the scheduler's decision."""

from __future__ import annotations

import time
from typing import Any

import zmq
from kvferry_connector import link

from bench.peer.engine_base import DEADLINE_S, PeerEngine, Say

HOOKS = ("on_new_request", "get_num_new_matched_tokens")


class Lookups(PeerEngine):
    """One engine; requests come alone, so that a lookup is all that happens."""

    def __init__(self, setup: dict[str, Any], say: Say) -> None:
        super().__init__(setup, say)
        self._arrived_s = self._answered_s = 0.0
        self._found = 0
        self.clock.cpu = True
        self.watch()
        match, arrive = self.scheduler.get_num_new_matched_tokens, self.scheduler.on_new_request

        def arrived(request: Any) -> None:
            # Its block hashes are made by now: they are vLLM's own.
            self._arrived_s = time.perf_counter()
            arrive(request)

        def matched(request: Any, computed: int) -> Any:
            answer = match(request, computed)
            if answer[0] is not None and not self._answered_s:
                self._answered_s = time.perf_counter()
                self._found = int(answer[0])
            return answer

        self.scheduler.on_new_request = arrived
        self.scheduler.get_num_new_matched_tokens = matched
        self._bytes: list[int] | None = None

    def store(self, seed: int, tokens: int) -> dict[str, Any]:
        """Compute a prompt and wait until it is saved."""
        self.begin(self.tokens(seed, tokens), 1)
        self.quiet()
        return {}

    def lookup(self, seed: int, tokens: int, hit: bool, count_bytes: bool) -> dict[str, Any]:
        """Look one prompt of ``tokens`` and one more up.

        ``hooks_ms``: in the scheduler's hooks until the answer (``hooks_cpu_ms``: CPU of all the
        connector's hooks of these steps); ``answer_ms``, ``steps``: from
        arrival until the scheduler knew; ``wire_bytes``: sent and received by the process.
        Raises RuntimeError when as many tokens as expected were not found.
        """
        prompt = self.tokens(seed, tokens + 1)
        if count_bytes and self._bytes is None:
            self._bytes = count_wire()
        self._answered_s = 0.0
        self.clock.take()
        moved = sum(self._bytes or ())
        self.begin(prompt, 1)
        steps = 0
        while not self._answered_s:
            self.engine.step()
            steps += 1
            if time.perf_counter() - self._arrived_s > DEADLINE_S:
                raise TimeoutError(f"the lookup is not answered within {DEADLINE_S:.0f} s")
        spent = self.clock.take()
        hooks_us = sum(spent.by_method_us.get(hook, 0.0) for hook in HOOKS)
        moved = sum(self._bytes or ()) - moved
        if count_bytes and moved < 2 * tokens:  # a hash of 32 bytes per 16 tokens, at the least
            raise RuntimeError(f"only {moved} bytes were counted for {tokens} tokens")
        if hit:
            self.engine.finish()
        else:
            self.engine.end_all()
        self.quiet()
        expected = tokens if hit else 0
        if self._found != expected:
            raise RuntimeError(f"{self._found} of {tokens} tokens were found, not {expected}")
        return {
            "hooks_ms": hooks_us / 1e3,
            "hooks_cpu_ms": spent.cpu_us / 1e3,
            "answer_ms": (self._answered_s - self._arrived_s) * 1e3,
            "steps": steps,
            "wire_bytes": moved,
        }


def count_wire() -> list[int]:
    """Count from now on what the process's DEALER sockets send and receive; bytes in cell 0."""
    total = [0]
    send, receive = zmq.Socket.send, zmq.Socket.recv

    def sent(self: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        done = send(self, data, *args, **kwargs)
        if self.socket_type == zmq.DEALER:
            total[0] += len(data)
        return done

    def received(self: Any, *args: Any, **kwargs: Any) -> Any:
        data = receive(self, *args, **kwargs)
        if self.socket_type == zmq.DEALER:
            total[0] += len(data)
        return data

    past = link._send  # kvferry's hooks go past zmq.Socket.send

    def sent_by_hook(self: Any, data: Any, flags: int) -> Any:
        done = past(self, data, flags)
        total[0] += len(data)
        return done

    zmq.Socket.send, zmq.Socket.recv, link._send = sent, received, sent_by_hook
    return total
