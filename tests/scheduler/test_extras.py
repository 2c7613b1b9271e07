"""Equal tokens under another adapter, salt or image, in vLLM's real Scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.scheduler_harness import SchedulerUnderTest, loads_of
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

PROMPT = list(range(10, 210))
IMAGE_TOKENS = 8


def image(name: str) -> dict[str, Any]:
    """It begins in the second block."""
    place = PlaceholderRange(offset=20, length=IMAGE_TOKENS)
    return {"mm_features": [MultiModalFeatureSpec(None, "image", name, place)]}


EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "adapter": {"lora_request": LoRARequest("style-a", 1, "/adapters/a")},
    "another adapter": {"lora_request": LoRARequest("style-b", 2, "/adapters/b")},
    "salt": {"cache_salt": "tenant-a"},
    "another salt": {"cache_salt": "tenant-b"},
    "image": image("cat"),
    "another image": image("dog"),
}


def test_each_finds_its_own_and_nothing_of_the_others(tmp_path: Path) -> None:
    engine = SchedulerUnderTest(tmp_path)
    engine.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=64)
    engine.scheduler.max_num_encoder_input_tokens = 64
    for turn in ("new", "again"):
        engine.node.jobs.clear()
        for name, extras in EXTRAS.items():
            engine.add(f"{name}, {turn}", PROMPT, extras=extras)
            engine.run()
            engine.forget_local()
        if turn == "new":  # what stands before an image is what stands there without one
            assert loads_of(engine.node) == [("image, new", 0, 16), ("another image, new", 0, 16)]
    assert loads_of(engine.node) == [(f"{name}, again", 0, 192) for name in EXTRAS]
    engine.assert_idle()
