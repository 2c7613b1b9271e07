"""The worker process of an engine with several ranks: its weights are spread there too."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from kvferry_demo import spread


class SpreadWorker(CPUWorker):  # type: ignore[misc]  # vLLM is not followed by mypy
    """Named by ``EngineArgs.worker_cls``: vLLM starts workers anew, without our patches."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model with spread weights."""
        spread.install()
        super().load_model(*args, **kwargs)
