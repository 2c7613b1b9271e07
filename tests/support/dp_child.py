"""A vLLM deployment of two data-parallel engines: ``python -m support.dp_child MODEL RUN_DIR``.

vLLM's own front end starts and feeds the two engine cores. Each line on stdin is one request
``{"rank": 0 | 1, "tokens": [...]}``; each line on stdout ``{"output": [...]}``. The end of stdin
ends it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import BinaryIO


def main() -> None:
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # vLLM prints there
    # SIGTERM unwinds too: the engine processes are ours to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    asyncio.run(serve(sys.argv[1], sys.argv[2], replies))


async def serve(model: str, run_dir: str, replies: BinaryIO) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model,
            load_format="dummy",
            worker_cls="kvferry_demo.worker.SpreadWorker",
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            max_model_len=4096,
            max_num_seqs=4,
            max_num_batched_tokens=512,
            kv_cache_memory_bytes=32 << 20,
            data_parallel_size=2,
            kv_transfer_config={
                "kv_connector": "FerryConnector",
                "kv_connector_module_path": "kvferry_connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"run_dir": run_dir, "probe_ms_max": 20_000},
            },
        )
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    try:
        say(replies, {})
        for number in range(1 << 30):
            line = await asyncio.to_thread(sys.stdin.buffer.readline)
            if not line:
                break
            request = json.loads(line)
            output: list[int] = []
            async for part in llm.generate(
                {"prompt_token_ids": request["tokens"]},
                sampling,
                str(number),
                data_parallel_rank=request["rank"],
            ):
                output = list(part.outputs[0].token_ids)
            say(replies, {"output": output})
    finally:
        llm.shutdown()


def say(replies: BinaryIO, answer: object) -> None:
    replies.write(json.dumps(answer).encode() + b"\n")
    replies.flush()


if __name__ == "__main__":
    main()
