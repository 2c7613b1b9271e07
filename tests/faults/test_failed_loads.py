"""Loads that fail on real sockets, each cause once: what is told, and what hits after it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kvferry_connector.wire.hot import Release
from support.books import read_status, wait_settled
from support.client_half import ClientEngine, client_engine
from support.kit import ENABLED, Kit
from support.sidecar import SidecarUnderTest, running_sidecar, set_flags
from support.waiting import wait_until

BLOCKS, FIRST, SECOND = (1, 2, 3), (4, 5, 6), (7, 8, 9)
# Copies that shall be done stay within it on a busy machine too.
LIMITS = {"limits.copy_ms_max": 4000, "limits.fence_ms_max": 4000}


@pytest.fixture(scope="module")
def sidecar() -> Iterator[SidecarUnderTest]:
    with running_sidecar(pool_bytes=32 << 20, flags=(*set_flags(LIMITS), *ENABLED)) as found:
        yield found


@pytest.fixture
def engine(sidecar: SidecarUnderTest, request: pytest.FixtureRequest) -> Iterator[ClientEngine]:
    with client_engine(sidecar.run_dir, engine_id=request.node.name[:64]) as found:
        yield found
        Kit(sidecar.run_dir).rules()
        wait_settled(sidecar.run_dir)


def damage(sidecar: SidecarUnderTest, content: bytes) -> None:
    """Change bytes of a stored chunk behind the sidecar's back."""
    segment = Path("/dev/shm", sidecar.pool_name)
    at = segment.read_bytes().find(content[:256])
    assert at >= 0
    with segment.open("r+b") as file:
        file.seek(at + 100)
        file.write(bytes(byte ^ 0xFF for byte in content[100:104]))


@pytest.mark.parametrize(
    ("rule", "step", "reason"),
    [
        ("fail load times=1", 0, "copy-failed"),
        ("hold load times=1", 0, "copy-deadline"),
        ("", 1 << 40, "fence"),
    ],
)
def test_a_load_that_fails_leaves_its_objects_for_the_next(
    sidecar: SidecarUnderTest, engine: ClientEngine, rule: str, step: int, reason: str
) -> None:
    engine.put(reason)
    Kit(sidecar.run_dir).rules(rule)
    admission, answer = engine.lease(reason, 3)
    assert answer.hit_tokens == 48
    outcome = engine.ended(engine.submit(engine.load_job(admission, FIRST, step=step)))
    assert (outcome.status, outcome.reason) == ("failed", reason)
    assert engine.get(reason) == 48, "the object is not to blame"


@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_a_damaged_object_fails_once_for_each_that_shares_it(
    sidecar: SidecarUnderTest, engine: ClientEngine, chunk: int
) -> None:
    prompt = f"damaged {chunk}"
    engine.put(prompt)
    shared = [engine.lease(prompt, 3) for _ in range(2)]
    assert [answer.hit_tokens for _, answer in shared] == [48, 48]
    damage(sidecar, engine.content(prompt, chunk))
    for (admission, _), blocks in zip(shared, (FIRST, SECOND), strict=True):
        engine.wipe(blocks)
        outcome = engine.ended(engine.submit(engine.load_job(admission, blocks)))
        assert outcome.status == "failed", "both, once each"
        assert outcome.shorter_tokens == chunk * 16, "the longest prefix that is still complete"
        engine.scheduler.send(Release([admission]))
    wait_until(
        lambda: read_status(sidecar.run_dir)["pool"]["doomed"] == 0, "freed with its last lease"
    )
    assert engine.get(prompt) == chunk * 16, "what is offered now, and it loads"
    engine.put(prompt)
    assert engine.get(prompt) == 48, "stored anew, under the same key"
