"""Tenants bound to users: real credentials of real sockets, refused by name. Needs root."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest
from kvferry_connector.wire import attach
from kvferry_sidecar.errors import ConfigError
from kvferry_sidecar.sessions import tenants
from kvferry_sidecar.sessions.tenants import Credentials
from support.hot_engine import HotEngine
from support.other_users import as_user
from support.raw_half import KvMemory, RawHalf, engine_registration
from support.sidecar import SidecarUnderTest, make_sidecar

GROUP = 20_010  # of the run directory
RED, BLUE, STRANGER = (20_001, 30_001), (20_002, 30_002), (20_003, 30_003)
BOUND = "red=uid:20001; blue=gid:30002,uid:4"


@pytest.fixture(scope="module")
def sidecar() -> Iterator[SidecarUnderTest]:
    if os.geteuid():
        pytest.skip("other users' processes need root")
    with make_sidecar(flags=["--set", f"namespaces.bound={BOUND}"]) as found:
        for folder in (found.run_dir.parent, found.run_dir):
            os.chown(folder, 0, GROUP)
            folder.chmod(0o2750)
        found.start()
        yield found


def half(sidecar: SidecarUnderTest, who: tuple[int, int], **more: object) -> RawHalf:
    with as_user(*who, GROUP):
        return RawHalf(sidecar.run_dir, **more)


@contextmanager
def engine_of(
    sidecar: SidecarUnderTest, who: tuple[int, int], tenant: str, name: str
) -> Iterator[HotEngine]:
    """Yield an engine whose halves are registered. AssertionError with the refusal."""
    with closing(KvMemory()) as memory, ExitStack() as stack:
        yield _registered(sidecar, who, tenant, name, memory, stack)


def _registered(
    sidecar: SidecarUnderTest,
    who: tuple[int, int],
    tenant: str,
    name: str,
    memory: KvMemory,
    stack: ExitStack,
) -> HotEngine:
    life = name.encode().ljust(16, b".")
    scheduler = stack.enter_context(closing(half(sidecar, who, engine_id=name)))
    worker = half(sidecar, who, rank=0, engine_id=name, memory=memory)
    stack.enter_context(closing(worker))
    scheduler.attach()
    worker.attach()
    scheduler.register(engine_registration([0], life))
    identity = {"model": "raw", "hash_seed": "0"} | ({"tenant": tenant} if tenant else {})
    worker.register(memory.registration(0, 1, identity=identity))
    for one in (scheduler, worker):
        one.stream.expect(attach.Ready)
    return HotEngine(scheduler, worker, memory, life)


def test_tenants_are_served_and_share_nothing(sidecar: SidecarUnderTest) -> None:
    with (
        engine_of(sidecar, RED, "red", "r") as red,
        engine_of(sidecar, BLUE, "blue", "b") as blue,
        engine_of(sidecar, RED, "red", "r2") as again,
    ):
        red.put("secret")
        assert red.get("secret") == 48
        assert blue.get("secret") == 0
        assert again.get("secret") == 48


@pytest.mark.parametrize(
    ("who", "tenant", "words"),
    [
        (RED, "blue", "may be red"),
        (RED, "", "may be red"),
        (BLUE, "red", "may be blue"),
        ((0, 0), "red", "may be no tenant that is bound"),
    ],
)
def test_another_tenants_name_is_refused(
    sidecar: SidecarUnderTest, who: tuple[int, int], tenant: str, words: str
) -> None:
    name = f"liar {who[0]} {tenant}"
    with pytest.raises(AssertionError) as refused, engine_of(sidecar, who, tenant, name):
        pass
    text = str(refused.value)
    assert "'tenant'" in text
    assert words in text


def test_the_sidecars_own_user_may_be_who_is_not_bound(sidecar: SidecarUnderTest) -> None:
    for tenant in ("", "green"):
        with engine_of(sidecar, (0, 0), tenant, f"own {tenant}") as engine:
            engine.put("served")


def test_strangers_and_other_users_halves_are_refused(sidecar: SidecarUnderTest) -> None:
    stranger = half(sidecar, STRANGER)
    refused = stranger.stream.expect(attach.Refused)
    assert refused.code == "uid"
    assert "uid 20003 may not attach" in refused.message
    asking = half(sidecar, RED)
    asking.stream.send(attach.StatusQuery())
    assert asking.stream.expect(attach.Refused).code == "uid", "the status tells of all tenants"
    first = half(sidecar, RED, engine_id="one engine")
    first.attach()
    with closing(KvMemory()) as memory:
        second = half(sidecar, BLUE, rank=0, engine_id="one engine", memory=memory)
        with pytest.raises(AssertionError) as mixed:
            second.attach()
    assert "another user's process" in str(mixed.value)
    for one in (stranger, asking, first, second):
        one.close()


def test_a_tenant_takes_no_more_streams_than_its_share() -> None:
    if os.geteuid():
        pytest.skip("other users' processes need root")
    flags = ["--set", f"namespaces.bound={BOUND}", "--set", "limits.hello_ms_max=600000"]
    flags += ["--set", "limits.connections_max=9", "--set", "limits.sessions_max=3"]
    with make_sidecar(flags=flags) as found, ExitStack() as held:
        for folder in (found.run_dir.parent, found.run_dir):
            os.chown(folder, 0, GROUP)
            folder.chmod(0o2750)
        found.start()
        first = held.enter_context(closing(half(found, RED, engine_id="r1")))
        first.attach()
        second = held.enter_context(closing(half(found, RED, engine_id="r2")))
        with pytest.raises(AssertionError, match=r"tenant-share.*limits\.sessions_max"):
            second.attach()
        silent = [held.enter_context(closing(half(found, RED))) for _ in range(12)]
        answers = [one.stream.expect(attach.Refused) for one in silent[2:]]
        assert {one.code for one in answers} == {"tenant-share"}
        assert "limits.connections_max" in answers[0].message
        for who, tenant, name in ((BLUE, "blue", "b"), ((0, 0), "", "own")):
            with engine_of(found, who, tenant, name) as engine:
                engine.put("served")
        assert found.status()["pid"] == found.process.pid


def test_without_a_binding_a_name_is_only_a_name() -> None:
    assert tenants.NOBODY_BOUND.refusal(Credentials(5, 5), {"tenant": "red"}, own=True) is None
    assert not tenants.NOBODY_BOUND.admits(Credentials(5, 5))


def test_a_number_that_no_user_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="names no user"):
        tenants.parse("red=uid:4294967295")


@pytest.mark.parametrize("text", ["red", "red=1000", "red=uid:x", "red=uid:1; red=uid:2", "=uid:1"])
def test_a_binding_in_the_wrong_form_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        tenants.parse(text, "flag --set")
    assert "no binding" in refused.value.message
