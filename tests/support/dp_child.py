"""A vLLM deployment with its own front end: ``python -m support.dp_child MODEL RUN_DIR [EXTRA]``.

vLLM starts and feeds two data-parallel engine cores, or one where EXTRA, a JSON object of further
connector settings, is given. Each line on stdin is one request ``{"rank": 0 | 1, "tokens": [...]}``
or ``{"pause": MODE}`` (which also clears the cache, and resumes); each line on stdout is
``{"output": [...]}``. The end of stdin ends it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import Any, BinaryIO


def main() -> None:
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # vLLM prints there
    # SIGTERM unwinds too: the engine processes are ours to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    extra = json.loads(sys.argv[3]) if len(sys.argv) > 3 else None
    asyncio.run(serve(sys.argv[1], sys.argv[2], replies, extra))


async def serve(model: str, run_dir: str, replies: BinaryIO, extra: dict[str, Any] | None) -> None:
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
            data_parallel_size=1 if extra is not None else 2,
            kv_transfer_config={
                "kv_connector": "FerryConnector",
                "kv_connector_module_path": "kvferry_connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {
                    "run_dir": run_dir,
                    "probe_ms_max": 20_000,
                    **(extra or {"silent_ms_max": 60_000}),
                },
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
            if "pause" in request:
                await llm.pause_generation(mode=request["pause"], clear_cache=True)
                await llm.resume_generation()
                say(replies, {"output": []})
                continue
            output: list[int] = []
            async for part in llm.generate(
                {"prompt_token_ids": request["tokens"]},
                sampling,
                str(number),
                data_parallel_rank=request["rank"] if extra is None else None,
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
