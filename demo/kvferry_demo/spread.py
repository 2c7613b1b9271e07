"""Give dummy weights a spread, so that the output depends on every token of the context.

vLLM's ``load_format="dummy"`` draws weights within +-1e-3: attention is then almost uniform, the
greedy output hardly changes with the KV cache, and a block loaded wrongly would go unnoticed.
Each parameter is drawn anew from a generator seeded by its own name, so every process that
builds the model gets the same weights. Of layers whose outputs are split over tensor-parallel
ranks (keys and values among them) each rank draws its own: else all ranks would hold equal KV.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import torch
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

# Decay and step of a state space: it forgets over hundreds of tokens, neither at once nor never.
_STATE_RANGES = {"A": (-1.0, -0.05), "A_log": (-1.0, 1.0), "dt_bias": (-3.0, 0.0), "D": (0.5, 1.5)}
# Weight matrices get sqrt(fan_in) scaling times this: activations grow a little per layer, so
# attention is peaked on few tokens and the choice of those tokens decides the output.
MATRIX_GAIN = 1.6


def install() -> None:
    """Make the dummy loader of this process draw spread weights; calling it again is harmless."""
    if getattr(DummyModelLoader, "kvferry_spread", False):
        return
    plain = DummyModelLoader.load_weights

    def load_weights(self: Any, model: Any, model_config: Any) -> None:
        plain(self, model, model_config)
        split = _split_parameters(model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if _is_drawn(parameter):
                    seed = f"{name} of rank {split[name]}" if name in split else name
                    parameter.copy_(_draw(seed, parameter).to(parameter.dtype))

    DummyModelLoader.load_weights = load_weights
    DummyModelLoader.kvferry_spread = True


def _split_parameters(model: Any) -> dict[str, int]:
    """Return the parameters that each tensor-parallel rank has its own part of, with the rank."""
    if get_tensor_model_parallel_world_size() == 1:
        return {}
    rank = int(get_tensor_model_parallel_rank())
    return {
        f"{module_name}.{name}": rank
        for module_name, module in model.named_modules()
        if isinstance(module, ColumnParallelLinear)
        for name, _ in module.named_parameters(recurse=False)
    }


def _is_drawn(parameter: Any) -> bool:
    """Tell whether a parameter is a plain float of 16 bits or more that has memory."""
    if parameter.device.type == "meta" or not torch.is_floating_point(parameter):
        return False
    return bool(torch.finfo(parameter.dtype).bits >= 16)


def _draw(name: str, parameter: Any) -> Any:
    """Return new values of a parameter's shape: around one for scales, normal for matrices."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    low_high = _STATE_RANGES.get(name.rsplit(".", 1)[-1])
    if low_high is not None:
        low, high = low_high
        return low + (high - low) * torch.rand(parameter.shape, generator=generator)
    if parameter.dim() <= 1:
        unit = torch.rand(parameter.shape, generator=generator)
        centre, width = (0.0, 0.2) if name.endswith("bias") else (1.0, 0.6)
        return centre + width * (unit - 0.5)
    # A depthwise convolution [channels, 1, taps] reads its taps; experts are [experts, out, in].
    gain = 1.0 if "embed" in name else MATRIX_GAIN / math.sqrt(parameter.shape[-1])
    return torch.randn(parameter.shape, generator=generator) * gain
