"""The connector's logger: a child of vLLM's, so that its lines stand in the engine's log."""

import logging

LOGGER = "vllm.kvferry"  # by name only: nothing of vLLM is imported here
logger = logging.getLogger(LOGGER)
