"""Where the pages of each layer lie: the affine formula of the config, held against the tensors.

A page of layer ``l`` and block ``b`` is at ``base + offset + l * layer_stride + b * block_stride``.
A layout that is not like that is refused here, before anything is registered, and never copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvferry_connector.wire.attach import Placement

if TYPE_CHECKING:
    from kvferry_connector.export import KvMemory

KVCacheConfig = Any  # vLLM's, read by attribute, so that this file runs without vLLM
KVCacheSpec = Any
LayerView = Any  # a torch.Tensor [num_blocks * r, heads, states, content]: r kernel blocks each


class DescribeError(Exception):
    """The engine's KV memory is not where its config says; nothing may be copied."""


def describe_placements(
    kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, LayerView], memory: KvMemory
) -> list[Placement]:
    """Return where the pages of each layer lie, checked against the tensors.

    Layers that share another one's KV are in ``kv_caches`` only, so nothing is listed twice.
    Groups whose blocks are never shared by hash (rings, HiSparse replicas) are left out.
    """
    groups = kv_cache_config.kv_cache_groups
    group_of = {layer: n for n, group in enumerate(groups) for layer in group.layer_names}
    placements: list[Placement] = []
    for tensor in kv_cache_config.kv_cache_tensors:
        layers = list(tensor.layers)
        numbers = {group_of.get(layer, -1) for layer in layers}
        if len(numbers) > 1 or -1 in numbers:
            raise DescribeError(f"layers {layers} are placed together but not of one group")
        if numbers & set(kv_cache_config.prefix_cacheable_group_ids):
            number = numbers.pop()
            spec = groups[number].kv_cache_spec
            spec = getattr(spec, "kv_cache_specs", {layers[0]: spec})[layers[0]]
            num_blocks = int(kv_cache_config.num_blocks_of(tensor))
            placements.append(
                _place(number, spec, tensor, kv_caches, memory=memory, num_blocks=num_blocks)
            )
    return placements


def _place(
    number: int,
    spec: KVCacheSpec,
    tensor: Any,
    kv_caches: Mapping[str, LayerView],
    *,
    memory: KvMemory,
    num_blocks: int,
) -> Placement:
    """Return the placement of one KVCacheTensor's layers."""
    layers = list(tensor.layers)
    missing = [layer for layer in layers if layer not in kv_caches]
    if missing:
        raise DescribeError(f"layers {missing} are in the KV config, but have no KV tensor")
    first = kv_caches[layers[0]]
    buffer = memory.find(first)
    base = int(first.untyped_storage().data_ptr())
    for index, layer in enumerate(layers):
        start = base + tensor.offset + index * tensor.layer_stride
        _check_layer(layer, kv_caches[layer], start, tensor.block_stride, num_blocks)
    runs, run_bytes, run_stride = page_runs(first, num_blocks)
    page_bytes = page_data_bytes(spec)
    if runs * run_bytes != page_bytes:
        raise DescribeError(
            f"a page of layer {layers[0]} has {runs} x {run_bytes} bytes in its tensor, "
            f"{page_bytes} in its spec ({type(spec).__name__})"
        )
    return Placement(
        group=number,
        layers=layers,
        buffer=buffer.buffer,
        offset=base - buffer.address + int(tensor.offset),
        layer_stride=int(tensor.layer_stride),
        block_stride=int(tensor.block_stride),
        page_bytes=page_bytes,
        runs=runs,
        run_bytes=run_bytes,
        run_stride=run_stride,
    )


def _check_layer(
    layer: str, view: LayerView, start: int, block_stride: int, num_blocks: int
) -> None:
    """Hold the addresses of the first, second and last block against the formula."""
    if view.shape[0] % num_blocks:
        raise DescribeError(
            f"layer {layer} has {view.shape[0]} kernel blocks, no multiple of {num_blocks} blocks"
        )
    ratio = view.shape[0] // num_blocks
    for block in sorted({0, min(1, num_blocks - 1), num_blocks - 1}):
        found, expected = view[block * ratio].data_ptr(), start + block * block_stride
        if found != expected:
            raise DescribeError(
                f"block {block} of layer {layer} is at {found:#x}, its config says "
                f"{expected:#x}: this KV layout is not understood. Choose another with "
                "VLLM_KV_CACHE_LAYOUT (LBNHC is the plainest)"
            )


def page_runs(view: LayerView, num_blocks: int) -> tuple[int, int, int]:
    """Return (runs, bytes of a run, distance of runs) of block 0 in a layer's view.

    ``view`` is ``[num_blocks * r, heads, states, content]``. A dense page, in whatever order of
    its axes, is one run; otherwise one axis (heads) may stand outside.
    """
    item_bytes = view.element_size()
    sizes = (view.shape[0] // num_blocks, *view.shape[1:])
    axes: list[tuple[int, int]] = [
        (int(stride) * item_bytes, int(size))
        for stride, size in zip(view.stride(), sizes, strict=True)
        if size > 1
    ]
    run_bytes = item_bytes
    axes.sort()
    while axes and axes[0][0] == run_bytes:
        run_bytes *= axes.pop(0)[1]
    if not axes:
        return 1, run_bytes, 0
    if len(axes) > 1 or axes[0][0] < run_bytes:
        raise DescribeError(
            f"a page of shape {tuple(view.shape[1:])} with strides {tuple(view.stride())} is "
            "neither dense nor one run per head; choose another VLLM_KV_CACHE_LAYOUT"
        )
    return axes[0][1], run_bytes, axes[0][0]


def page_data_bytes(spec: KVCacheSpec) -> int:
    """Return the bytes of a page that carry data (without padding)."""
    unpadded = getattr(spec, "unpadded_page_size_bytes", None)
    if unpadded is None:
        unpadded = getattr(spec, "real_page_size_bytes", None)
    return int(spec.page_size_bytes if unpadded is None else unpadded)
