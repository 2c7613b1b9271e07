"""Tiny models, real text prompts and an engine process: the demo and the real-engine tests."""
