"""Saves that wait until a step's KV is known to be right.

Beside us under a MultiConnector another connector may load synchronously: the step computes with
what it brings, and only the step's output says which blocks it did not (``invalid_block_ids``).
What is saved of such a step, and of those built before its output is seen, waits for that output.

If blocks were invalid, all that waits is given up. vLLM then computes them anew in place, but until
then its own prefix cache hands them to other requests, and keeps what these compute with them.
Nobody can tell any more which blocks are right, so nothing is saved until that cache is reset.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from kvferry_connector.jobs import JobOrder
from kvferry_connector.log import logger


class Doubts:
    """The steps in doubt and the saves that wait for them, both in the order of steps."""

    def __init__(self, count: Callable[[str], None]) -> None:
        self._count = count
        self.spoiled = False  # vLLM's own cache may hold wrong blocks
        # Whether saves must be passed through ``hold``, and ranks are to say which step ends.
        self.active = False
        self._steps: deque[int] = deque()
        self._waiting: deque[tuple[int, JobOrder]] = deque()

    def begin(self, step: int) -> None:
        """A step is built in which another connector loads synchronously."""
        self._steps.append(step)
        self.active = True

    def hold(self, step: int, orders: Iterable[JobOrder]) -> list[JobOrder]:
        """Take what is ordered as ``step`` is built; return what may go out with that step."""
        self._waiting.extend((step, order) for order in orders)
        ready: list[JobOrder] = []
        while self._waiting and (not self._steps or self._waiting[0][0] < self._steps[0]):
            ready.append(self._waiting.popleft()[1])
        self.active = bool(self._steps or self._waiting)
        return ready

    def ended(self, step: int, *, invalid: bool) -> bool:
        """The output of a step is there; True when what waits must be given up.

        Outputs come in the order of steps: one in doubt that is missing said nothing good.
        """
        if not self._steps or step < self._steps[0]:
            return False
        bad = invalid or self._steps[0] < step
        while self._steps and self._steps[0] <= step:
            self._steps.popleft()
        if bad and not self.spoiled:
            self.spoiled = True
            self._count("saves_stopped")
            logger.error(
                "another connector did not load blocks of a step, or what came of it is lost: vLLM "
                "may hand wrong blocks from its own prefix cache to other requests, so nothing is "
                "saved until that cache is reset (POST /reset_prefix_cache, which needs "
                "VLLM_SERVER_DEV_MODE=1) or the engine is restarted"
            )
        return bad

    def give_up(self) -> list[JobOrder]:
        """Return all that waits: it must not go out any more."""
        orders = [order for _, order in self._waiting]
        self._waiting.clear()
        return orders

    def settle(self) -> None:
        """vLLM's own cache was reset, which it only is when no request holds a block."""
        self.spoiled = False
        self._steps.clear()
