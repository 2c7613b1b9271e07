"""The scheduler tests: vLLM's real Scheduler, from a config.json on disk and never the network."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
