"""`kvferry warm` with prefixes, as block hashes: of a disk, and of a store that a node filled."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from kvferry_connector.wire.hot import Release
from kvferry_native import mix_keys
from kvferry_sidecar.cli import main
from kvferry_sidecar.cli.warm import wanted_objects
from kvferry_sidecar.errors import RequestError
from support.client_half import ClientEngine, client_engine
from support.hot_engine import HASH_BYTES, hashes
from support.redis_server import RedisServer
from support.server import serving
from support.sidecar import SidecarUnderTest, running_sidecar, set_flags
from support.slow_tiers import POOL_BYTES, disk_settings, settings_of, wait_stored

PROMPTS = ("one", "two")
NAMESPACE, OTHER = "ab" * 16, "cd" * 16
KNOWN = {NAMESPACE: [0, 2], OTHER: [0]}


@contextmanager
def over_disk(folder: Path) -> Iterator[tuple[SidecarUnderTest, ClientEngine]]:
    """Yield a sidecar and its engine, whose prompts only the disk has."""
    with (
        running_sidecar(pool_bytes=POOL_BYTES, flags=set_flags(disk_settings(folder))) as sidecar,
        client_engine(sidecar.run_dir) as engine,
    ):
        for prompt in PROMPTS:
            engine.put(prompt)
        wait_stored(sidecar, 6)
        assert main(["act", "clear-pool", "--run-dir", str(sidecar.run_dir)]) == 0
        yield sidecar, engine


@contextmanager
def over_redis(folder: Path) -> Iterator[tuple[SidecarUnderTest, ClientEngine]]:
    """Yield a new node's sidecar and engine, after another node's engine saved the prompts."""
    with serving(RedisServer(folder)) as server:
        flags = set_flags(settings_of(server.url, {"limits__store_ms_max": 20_000}))
        with (
            running_sidecar(pool_bytes=POOL_BYTES, flags=flags) as first,
            client_engine(first.run_dir, engine_id="a") as writer,
        ):
            for prompt in PROMPTS:
                writer.put(prompt)
            wait_stored(first, 6)
        with (
            running_sidecar(pool_bytes=POOL_BYTES, flags=flags) as second,
            client_engine(second.run_dir, engine_id="b") as reader,
        ):
            yield second, reader


def line(found: Sequence[bytes], **more: str) -> str:
    """Return a prefix as a line of a list."""
    return json.dumps({"hashes": [one.hex() for one in found], **more}) + "\n"


@pytest.mark.parametrize("over", [over_disk, over_redis])
def test_a_prefix_is_given_by_its_hashes(over, tmp_path: Path, capsys) -> None:
    file = tmp_path / "prefixes"
    with over(tmp_path) as (sidecar, engine):
        place = ("--run-dir", str(sidecar.run_dir))
        # One hash more than was saved, as a router may know of blocks that only a GPU has.
        file.write_text(f"# hot\n{line(hashes('one', 4))}\n{line(hashes('unknown', 2))}")
        capsys.readouterr()
        assert main(["warm", str(file), "--dry-run", *place]) == 0
        assert "6 would be looked for" in capsys.readouterr().out
        assert main(["warm", str(file), *place]) == 0
        assert "3 absent, 3 fetched" in capsys.readouterr().out
        assert main(["objects", "list", *place]) == 0
        assert len(capsys.readouterr().out.splitlines()) == 3, "the other prompt stays below"
        admission, answer = engine.lease("one", 3)
        assert answer.sources == {"host": 48}
        assert engine.ended(engine.submit(engine.load_job(admission, (7, 8, 9)))).status == "done"
        assert engine.holds("one", (7, 8, 9))
        engine.scheduler.send(Release([admission]))


def test_every_group_may_have_an_object_at_every_hash(tmp_path: Path) -> None:
    file, known = tmp_path / "prefixes", hashes("one", 3)
    file.write_text(line(known, namespace="ABAB"))
    found = list(wanted_objects(file, KNOWN))
    assert [(one.namespace, one.group) for one in found] == [
        (NAMESPACE, group) for group in (0, 2) for _ in known
    ]
    for at, one in enumerate(found):
        # A hash alone names its object: it covers all that comes before it.
        key = mix_keys(bytes.fromhex(NAMESPACE), one.group, 0, known[at % 3], HASH_BYTES, 0, 1)
        assert one.key == key.tobytes().hex()


@pytest.mark.parametrize(
    ("text", "known", "why"),
    [
        (line(hashes("one", 2)), KNOWN, "fits 2 of those"),
        (line(hashes("one", 2), namespace="ef"), KNOWN, "fits 0 of those"),
        (line(hashes("one", 2)), {}, r"registered \(none\)"),
        ('{"hashes": [1234567890]}', KNOWN, "Expected `str`"),  # what vLLM tells by default
        ('{"hashes": ["abc"]}', KNOWN, "is no prefix"),
        ('{"hashes": [""]}', KNOWN, "empty"),
        ('{"hashes": ["ab", "abcd"]}', KNOWN, "of one length"),
        ('{"hashes": []}', KNOWN, "is no prefix"),
        ('{"hashes": ["ab"], "name": "x"}', KNOWN, "unknown field"),
    ],
)
def test_a_bad_prefix_is_refused_with_its_line(tmp_path: Path, text, known, why) -> None:
    file = tmp_path / "prefixes"
    file.write_text(f"# comment\n{text}\n")
    with pytest.raises(RequestError, match=why) as error:
        list(wanted_objects(file, known))
    assert "line 2" in error.value.message
