"""vLLM's block hashes tell apart what must not share; our keys are made of nothing else.

LoRA adapters, cache salts and multimodal items never reach kvferry by name. That is right only
as long as they change the hashes, which this test pins down for the vLLM that is installed.
"""

from __future__ import annotations

from typing import Any

import pytest

BLOCK_TOKENS = 16


@pytest.fixture(scope="module")
def hashes_of() -> Any:
    """Return a function from request extras to the request's block hashes."""
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)

    def hashes(*, lora: str = "", salt: str | None = None, image: str = "") -> list[bytes]:
        feature = MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=image,
            mm_position=PlaceholderRange(offset=20, length=8),
        )
        request = Request(
            request_id="r",
            prompt_token_ids=list(range(64)),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            mm_features=[feature] if image else None,
            lora_request=LoRARequest(lora, 1, f"/adapters/{lora}") if lora else None,
            cache_salt=salt,
            block_hasher=hasher,
        )
        return [bytes(one) for one in request.block_hashes]

    return hashes


def test_extras_change_every_hash_they_must(hashes_of: Any) -> None:
    plain = hashes_of()
    assert len(plain) == 64 // BLOCK_TOKENS
    assert hashes_of() == plain
    kinds = {
        "lora": hashes_of(lora="style-a"),
        "another lora": hashes_of(lora="style-b"),
        "salt": hashes_of(salt="tenant-a"),
        "another salt": hashes_of(salt="tenant-b"),
        "image": hashes_of(image="cat")[1:],  # it begins in the second block
        "another image": hashes_of(image="dog")[1:],
    }
    seen = set(plain)
    for kind, hashes in kinds.items():
        assert not seen & set(hashes), f"{kind} shares blocks"
        seen |= set(hashes)
    assert hashes_of(image="cat")[0] == plain[0], "before the image nothing differs"
