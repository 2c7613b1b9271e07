"""kvferry's connector for vLLM: the small half that lives in the engine."""
