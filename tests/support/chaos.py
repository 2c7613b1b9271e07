"""Random faults of a sidecar, in a thread: by the fault kit, by signals, by damage to its pool.

Its engines are only stopped for a while; who drives them kills them.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from kvferry_sidecar.faults.rules import DOWN, UP
from support.kit import Kit
from support.sidecar import SidecarUnderTest

PAUSE_S = (0.3, 2.5)  # between two faults
STOPPED_S = (0.5, 4.0)
DAMAGED_BYTES = 64
FRAME_RULES = (
    "drop {} chance=0.05",
    "delay {} chance=0.05 ms=300",
    "repeat {} chance=0.1",
    "overtake {} chance=0.1",
    "garble {} chance=0.05",
)
OTHER_RULES = (
    "fail load chance=0.2",
    "fail save chance=0.2",
    "delay load ms=200 chance=0.3",
    "delay save ms=300 chance=0.3",
    "fail commit chance=0.3",
    "delay commit ms=50 chance=0.2",
    "kill save skip=20",
    "kill commit skip=20",
    "kill committed skip=20",
    "kill load skip=5",
)


class Chaos(threading.Thread):
    """Breaks something every now and then until ``end``; then the sidecar is whole again.

    ``engines()``: the processes of engines that live now.
    """

    def __init__(
        self, sidecar: SidecarUnderTest, seed: int, engines: Callable[[], Sequence[int]]
    ) -> None:
        super().__init__(name="chaos")
        self._sidecar = sidecar
        self._engines = engines
        self._rng = random.Random(seed)
        self._over = threading.Event()
        self.done: Counter[str] = Counter()
        self.restarts = 0
        self.errors: list[BaseException] = []

    def end(self) -> None:
        """Stop, repair, and raise what went wrong here."""
        self._over.set()
        self.join()
        if self.errors:
            raise self.errors[0]

    def run(self) -> None:
        try:
            while not self._over.wait(self._rng.uniform(*PAUSE_S)):
                self._one()
            self._revive()
            Kit(self._sidecar.run_dir).rules()
        except BaseException as error:  # noqa: BLE001 - raised again by ``end``
            self.errors.append(error)

    def _one(self) -> None:
        self._revive()
        luck, process = self._rng.random(), self._sidecar.process.process
        if luck < 0.6:
            self._rules()
        elif luck < 0.75:
            self._count("sigkill")
            self._sidecar.kill(signal.SIGKILL)
        elif luck < 0.82:
            self._count("sigterm")
            self._sidecar.process.stop()
        elif luck < 0.88:
            self._count("sigstop")
            self._freeze(process.pid)
        elif luck < 0.93:
            self._count("sigstop_engine")
            self._freeze(self._rng.choice(self._engines()))
        else:
            self._count("damage")
            self._damage()

    def _freeze(self, pid: int) -> None:
        """Stop a process for a while; it may be killed meanwhile, but is not reaped by others."""
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            self._over.wait(self._rng.uniform(*STOPPED_S))
            os.kill(pid, signal.SIGCONT)

    def _rules(self) -> None:
        kinds = sorted(UP | DOWN)
        rules = [self._rng.choice(FRAME_RULES).format(self._rng.choice(kinds)) for _ in range(4)]
        rules += self._rng.sample(OTHER_RULES, 2)
        self._count("rules")
        try:
            Kit(self._sidecar.run_dir).rules(*rules)
        except Exception:
            if self._sidecar.process.process.poll() is None:
                raise  # else a rule has killed it meanwhile

    def _revive(self) -> None:
        """Start it again if something has ended it."""
        if self._sidecar.process.process.poll() is not None:
            self.restarts += 1
            self._sidecar.restart()

    def _damage(self) -> None:
        """Overwrite bytes somewhere in the upper half of the segment: payloads, not the index."""
        path = Path("/dev/shm", self._sidecar.pool_name)
        size = path.stat().st_size
        with path.open("r+b") as segment:
            segment.seek(self._rng.randrange(size // 2, size - DAMAGED_BYTES))
            segment.write(os.urandom(DAMAGED_BYTES))

    def _count(self, what: str) -> None:
        self.done[what] += 1
