"""Settings of the connector: defaults, refusals, and the run directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from kvferry_connector import config as module
from kvferry_connector.config import ConfigError, FerryConfig, read_config
from support.sources import ROOT


def test_defaults() -> None:
    config = read_config({})
    assert config == FerryConfig()
    assert (config.lookup_wait_us_max, config.probe_ms_max, config.hint_fresh_ms) == (300, 100, 50)
    assert (config.awake_ms_max, config.job_ask_ms, config.silent_ms_max) == (60_000, 2000, 3000)


def test_settings_are_taken() -> None:
    config = read_config({"run_dir": "/run/other", "loads": False, "pinned_blocks_max": 7})
    assert (config.run_path(), config.loads, config.pins_max(1000)) == (
        Path("/run/other"),
        False,
        7,
    )
    assert FerryConfig().pins_max(1000) == 250
    assert FerryConfig().pins_max(2) == 1


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"run_dri": "/x"}, "['run_dri']: there is no such setting; did you mean 'run_dir'?"),
        ({"zzzzzzzz": 1}, "['zzzzzzzz']: there is no such setting; known: run_dir, "),
        ({"probe_ms_max": "100"}, "['probe_ms_max'] is '100': Expected `int`, got `str`"),
        ({"probe_ms_max": 1.5}, "['probe_ms_max'] is 1.5: Expected `int`, got `float`"),
        ({"probe_ms_max": True}, "['probe_ms_max'] is True: Expected `int`, got `bool`"),
        ({"loads": 1}, "['loads'] is 1: Expected `bool`, got `int`"),
        ({"run_dir": 1}, "['run_dir'] is 1: Expected `str`, got `int`"),
        ({"probe_ms_max": -1}, "['probe_ms_max'] is -1: Expected `int` >= 0"),
        ({"silent_ms_max": 0}, "['silent_ms_max'] is 0: Expected `int` >= 100"),
        ({"run_dir": "run"}, "['run_dir'] is 'run': expected an absolute path"),
        ({"run_dir": "/" + "x" * 90}, "longer than 80 bytes"),
    ],
)
def test_refusals_name_key_value_and_remedy(extra: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(extra)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [name for name in FerryConfig.__struct_fields__ if type(getattr(FerryConfig(), name)) is int],
)
def test_every_number_has_a_range(name: str) -> None:
    for number in (-1, 1 << 40):
        with pytest.raises(ConfigError, match=name):
            read_config({name: number})


def test_the_default_run_dir_is_the_nodes_else_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SYSTEM_RUN_DIR", tmp_path / "absent")
    assert FerryConfig().run_path() == Path(f"/tmp/kvferry-{os.getuid()}")
    monkeypatch.setattr(module, "_SYSTEM_RUN_DIR", tmp_path)
    assert FerryConfig().run_path() == tmp_path


def test_the_documentation_lists_every_setting_with_its_default() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text().partition("## Connector settings")[2]
    rows = {
        cells[1].strip(" `"): cells[2].strip(" `")
        for line in text.splitlines()
        if line.startswith("| `") and (cells := line.split("|"))
    }
    defaults = msgspec.structs.asdict(FerryConfig())
    assert rows == {
        name: str(value).lower() if isinstance(value, bool) else str(value) or '""'
        for name, value in defaults.items()
    }


def test_equal_paths_in_volumes_of_their_own_are_told_apart(tmp_path: Path) -> None:
    """As of two pods of one host. One volume that two containers see is one, whatever is in it."""
    pod, other, host = (tmp_path / name for name in ("pod", "other", "host"))
    for folder in (pod, other, host):
        folder.mkdir()
    say = "import sys, pathlib; from kvferry_connector.config import volume_of; \
print(volume_of(pathlib.Path(sys.argv[1])))"
    script = f"""
        say() {{ "{sys.executable}" -c "{say}" "$1/node"; }}
        say {pod}
        mount -t tmpfs none {pod} && say {pod} && mount -t tmpfs none {pod} && say {pod}
        mount -t tmpfs none {host} && mount --bind {host} {pod} && mount --bind {host} {other}
        say {pod} && mkdir {pod}/node && say {pod} && say {other}
    """
    made = subprocess.run(
        ["unshare", "--mount", "sh", "-ec", script], capture_output=True, text=True, check=False
    )
    if "unshare failed" in made.stderr:
        pytest.skip("mounts need root (unshare --mount)")
    none, first, second, *shared = made.stdout.split()
    assert len({none, first, second, shared[0]}) == 4, made.stderr
    assert shared == shared[:1] * 3
