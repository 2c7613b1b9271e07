"""The kvferry sidecar: one process per node that moves KV cache for vLLM engines."""
