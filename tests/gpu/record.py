"""Record vLLM's real Scheduler over full attention, a window and states: `python -m gpu.record`.

Writes recording.json. To be run again when jobs or registrations change in a way that the replay
does not know; the tests say so.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from gpu.replay import RECORDING, Event, Order, Recording
from kvferry_connector import worker_half
from kvferry_connector.client import Client
from kvferry_connector.jobs import JobOrder
from kvferry_connector.wire import attach, codec, hot
from support.four_ranks import EngineOfRanks
from support.sidecar import running_sidecar
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

BLOCK = 16
FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.float16)
WINDOW = SlidingWindowSpec(
    block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.float16, sliding_window=40
)
STATE = MambaSpec(
    block_size=BLOCK, shapes=((2, 512), (64,)), dtypes=(torch.float16, torch.float32),
    mamba_cache_mode="align", page_size_padded=FULL.page_size_bytes,
)  # fmt: skip
SPECS = {"full.0": FULL, "full.1": FULL, "window.0": WINDOW, "window.1": WINDOW,
         "state.0": STATE, "state.1": STATE}  # fmt: skip


class Tape:
    """Collects what passes between an engine's halves and its sidecar."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.hits: dict[str, int] = {}

    def send(self, message: hot.FromHalf, frames: Sequence[bytes]) -> None:
        if not isinstance(message, hot.OutcomeAck):
            body = msgspec.msgpack.encode(message)
            self.events.append(Event(body, [bytes(frame) for frame in frames]))

    def step(self, metadata: Any) -> None:
        loads, saves = ([_order(one) for one in jobs] for jobs in (metadata.loads, metadata.saves))
        self.events.append(Event(step=metadata.step, loads=loads, saves=saves))

    def take(self) -> list[Event]:
        """Return the events so far; of an ask that was repeated the last one."""
        asks = {}
        for number, event in enumerate(self.events):
            message = codec.read_from_half(event.body) if event.body else None
            if isinstance(message, hot.Ask):
                asks[message.admission] = number
        kept = [
            event
            for number, event in enumerate(self.events)
            if not event.body
            or not isinstance(message := codec.read_from_half(event.body), hot.Ask)
            or asks[message.admission] == number
        ]
        self.events = []
        return [event for event in kept if event.body or event.loads or event.saves]


def _order(order: JobOrder) -> Order:
    return Order(order.job, order.request, order.body, [bytes(frame) for frame in order.frames])


class _Pipe:
    """A rank's pipe that tells the tape of each step."""

    def __init__(self, pipe: Any, tape: Tape) -> None:
        self._pipe, self._tape = pipe, tape
        self.recv, self.poll, self.close = pipe.recv, pipe.poll, pipe.close

    def send(self, order: Any) -> None:
        if order is not None:
            self._tape.step(order.metadata)
        self._pipe.send(order)


def record(folder: Path) -> Recording:
    """Run an engine that saves two prompts, forgets them, and loads one and a longer one."""
    tape, told = Tape(), folder / "rank"
    describe, send, receive = worker_half.describe_rank, Client.send, Client.receive

    def described(*arguments: Any, **more: Any) -> Any:
        found = describe(*arguments, **more)
        told.write_bytes(msgspec.msgpack.encode(found))
        return found

    def sent(self: Client, link: Any, message: Any, raw: Sequence[bytes] = ()) -> bool:
        tape.send(message, raw)
        return send(self, link, message, raw)

    def received(self: Client, link: Any, wait_us: int = 0) -> Any:
        found = receive(self, link, wait_us)
        tape.hits |= {str(m.seq): m.hit_tokens for m, _ in found if isinstance(m, hot.Answer)}
        return found

    worker_half.describe_rank = described  # the rank's process is forked after this
    with running_sidecar() as sidecar:
        engine = EngineOfRanks(folder, sidecar.run_dir, SPECS, ranks=1, batch=64, kv_bytes=32 << 20)
        try:
            Client.send, Client.receive = sent, received
            engine._pipes = [_Pipe(pipe, tape) for pipe in engine._pipes]
            engine.run("first", prompt(8))
            engine.run("other", prompt(12, 11))
            first = tape.take()
            forget = engine.scheduler.kv_cache_manager.block_pool.reset_prefix_cache
            for name, tokens in (("again", prompt(8)), ("longer", prompt(16)),
                                 ("other again", prompt(12, 11))):  # fmt: skip
                forget()
                engine.run(name, tokens)
            second = tape.take()
            rank = msgspec.msgpack.decode(told.read_bytes(), type=attach.RegisterRank)
            return Recording(
                engine=msgspec.structs.replace(engine.connector._scheduler._engine, ranks=[0]),
                rank=_plain(rank),
                total_bytes=32 << 20,
                first=first,
                second=second,
                hits=tape.hits,
            )
        finally:
            Client.send, Client.receive = send, receive
            worker_half.describe_rank = describe
            engine.close()


def prompt(chunks: int, factor: int = 7) -> list[int]:
    """Whole blocks and one token more."""
    return [3 + (factor * number) % 450 for number in range(chunks * BLOCK + 1)]


def _plain(rank: attach.RegisterRank) -> attach.RegisterRank:
    """Take out what names the machine: the model's folder."""
    identity = {
        name: "recorded" if "/" in value else value for name, value in rank.identity.items()
    }
    return msgspec.structs.replace(rank, identity=identity)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = record(Path(folder))
    RECORDING.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))


if __name__ == "__main__":
    main()
