"""The worker process of an engine with several ranks: its weights are spread there too."""

from __future__ import annotations

from typing import Any

from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.worker.cpu_worker import CPUWorker

from kvferry_demo import spread


class SpreadWorker(CPUWorker):  # type: ignore[misc]  # vLLM is not followed by mypy
    """Named by ``EngineArgs.worker_cls``: vLLM starts workers anew, without our patches."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model with spread weights."""
        spread.install()
        super().load_model(*args, **kwargs)
        runner = self.model_runner
        if not get_pp_group().is_first_rank:
            # vLLM makes them in a warm-up, which an eager engine on CPU leaves out.
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens,
                dtype=self.model_config.dtype,
                device=runner.device,
            )
