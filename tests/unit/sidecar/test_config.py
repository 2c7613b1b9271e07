"""Configuration: layers, origins, and an error for everything that cannot be read."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from kvferry_connector.config import FerryConfig
from kvferry_sidecar import config, settings
from kvferry_sidecar.cli.options import FLAGS
from kvferry_sidecar.errors import ConfigError, PoolSegmentError
from kvferry_sidecar.limits import Limits
from kvferry_sidecar.settings import Setting
from support.sources import ROOT


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "kvferry.toml"

    def write(text):
        path.write_text(text)
        return path

    return write


def load(path=None, environment=None, **flags):
    given = {key.replace("__", "."): Setting(value, "flag") for key, value in flags.items()}
    return config.load(path, given, environment or {})


def test_defaults_are_complete():
    loaded = load()
    assert loaded.config.tiers.host.bytes == 4 << 30
    assert loaded.config.tiers.host.slab_bytes == 64 << 20
    assert loaded.config.tiers.host.keys_max == 262_144
    assert loaded.config.limits == Limits()
    assert set(loaded.origins) == set(config.KNOWN)
    assert all(origin.startswith("default") for origin in loaded.origins.values())


def test_the_run_directory_is_found_by_the_connector_too():
    assert load().config.run_dir == FerryConfig().run_path()


def test_flags_win_over_environment_over_file(file):
    path = file('[tiers.host]\nbytes = "1GiB"\nname = "a"\n[copy]\nthreads = 3\n')
    environment = {"KVFERRY_TIERS_HOST_NAME": "b", "KVFERRY_COPY_THREADS": "4"}
    loaded = load(path, environment, copy__threads="5")
    assert loaded.config.tiers.host.bytes == 1 << 30
    assert loaded.config.tiers.host.name == "b"
    assert loaded.config.copy.threads == 5
    assert loaded.origins["tiers.host.bytes"] == f"file {path}"
    assert loaded.origins["tiers.host.name"] == "environment KVFERRY_TIERS_HOST_NAME"
    assert loaded.origins["copy.threads"] == "flag"
    assert loaded.origins["tiers.host.slab_bytes"] == "default, from tiers.host.bytes"


def test_the_environment_may_name_the_file(file):
    path = file('[log]\nformat = "json"\n')
    assert load(environment={"KVFERRY_CONFIG": str(path)}).config.log.format == "json"


def test_limits_are_overridden_by_name(file):
    loaded = load(file("[limits]\nsessions_max = 3\nkey_bytes_max = '1MiB'\n"))
    assert loaded.config.limits.sessions_max == 3
    assert loaded.config.limits.key_bytes_max == 1 << 20
    assert loaded.config.limits.ranks_max == Limits().ranks_max


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("run_dri = '/run/x'", "run_dir"),
        ("[tiers.host]\nbyte = 5", "tiers.host.bytes"),
        ("[tier.host]\nbytes = 5", "tiers.host.bytes"),
        ("[limits]\nsession_max = 5", "limits.sessions_max"),
        ("threads = 5", "copy.threads"),
        ("[copi]\n", None),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(file, text, near):
    path = file(text)
    with pytest.raises(ConfigError) as error:
        load(path)
    assert str(path) in error.value.message
    if near:
        assert error.value.remedy == f"did you mean {near}?"


def test_an_unknown_variable_is_refused_with_the_nearest():
    with pytest.raises(ConfigError) as error:
        load(environment={"KVFERRY_TIER_HOST_BYTES": "1GiB"})
    assert "KVFERRY_TIER_HOST_BYTES" in error.value.message
    assert error.value.remedy == "did you mean KVFERRY_TIERS_HOST_BYTES?"


@pytest.mark.parametrize("value", ["1", "", "0"])  # the library only asks whether it is there
def test_no_variable_turns_rdma_into_tcp(value):
    rdma = {"tiers__remote__url": "mooncake://10.0.0.7:50051", "tiers__remote__protocol": "rdma"}
    load(**rdma)
    with pytest.raises(ConfigError, match=r"tiers\.remote\.protocol is rdma") as error:
        load(environment={"MC_FORCE_TCP": value}, **rdma)
    assert error.value.remedy.startswith("unset MC_FORCE_TCP")
    load(environment={"MC_FORCE_TCP": value}, **rdma | {"tiers__remote__protocol": "tcp"})


@pytest.mark.parametrize("protocol", ["rdma", "tcp"])
def test_no_variable_chooses_the_transport(protocol):
    """With 1 the library takes the devices it finds, and TCP where it finds none."""
    given = {"tiers__remote__url": "mooncake://10.0.0.7:50051", "tiers__remote__protocol": protocol}
    load(environment={"MC_MS_AUTO_DISC": "0"}, **given)
    with pytest.raises(ConfigError, match=rf"tiers\.remote\.protocol is {protocol}") as error:
        load(environment={"MC_MS_AUTO_DISC": "1"}, **given)
    assert error.value.remedy == "unset MC_MS_AUTO_DISC"
    load(environment={"MC_MS_AUTO_DISC": "1"}, tiers__remote__url="redis://10.0.0.7:6379")


def test_an_unknown_flag_key_is_refused():
    with pytest.raises(ConfigError, match=r"did you mean limits\.ranks_max"):
        load(limits__rank_max=3)


@pytest.mark.parametrize(
    "name",
    ["KVFERRY_SERVICE_HOST", "KVFERRY_METRICS_SERVICE_PORT_HTTP", "KVFERRY_PORT",
     "KVFERRY_PORT_9090_TCP_ADDR", "KVFERRY_WEB_PORT_80_TCP"],
)  # fmt: skip
def test_what_kubernetes_adds_for_a_service_is_no_mistake(name):
    load(environment={name: "tcp://10.0.0.1:80"})


@pytest.mark.parametrize(
    ("text", "value"),
    [("8GiB", 8 << 30), ("8 GiB", 8 << 30), ("1.5GiB", 3 << 29), ("2000000", 2_000_000),
     ("3MB", 3_000_000), ("2097152B", 2 << 20)],
)  # fmt: skip
def test_sizes(text, value):
    assert load(tiers__host__bytes=text).config.tiers.host.bytes == value


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("tiers__host__bytes", "8gb", "no|not a size"),
        ("tiers__host__bytes", "1.5", "not a size"),
        ("tiers__host__bytes", "-8GiB", "not a size"),
        ("tiers__host__bytes", "", "not a size"),
        ("tiers__host__bytes", 1.5, "an integer"),
        ("tiers__host__bytes", True, "an integer"),
        ("tiers__host__bytes", 4096, "1048576"),
        ("tiers__host__slab_bytes", 3 << 20, "power of two.*4 MiB"),
        ("tiers__host__slab_bytes", "8GiB", "over tiers.host.bytes"),
        ("tiers__host__name", "a/b", "name"),
        ("http__listen", "127.0.0.1:99999", "no such port"),
        ("http__listen", "9480", "http.listen"),
        ("http__probes_listen", "a b:80", "http.probes_listen"),
        ("tiers__host__name", "", "text"),
        ("copy__threads", "many", "whole number"),
        ("copy__threads", 0, "at least 1"),
        ("copy__threads", 1000, "256"),
        ("log__level", "loud", "debug|loud"),
        ("limits__drain_ms_max", "30s", "milliseconds"),
        ("limits__ranks_max", 0, "at least 1"),
        ("limits__router_hwm", 2**31, "2147483647"),
        ("limits__stall_ms_max", 19, ">= 20"),
        ("run_dir", "relative", "absolute"),
        ("run_dir", "/" + "x" * 90, "longer than 80"),
    ],
)
def test_a_bad_value_is_an_error_and_never_a_default(key, value, words):
    with pytest.raises(ConfigError) as error:
        load(**{key: value})
    assert key.replace("__", ".") in error.value.message
    assert "flag" in error.value.message
    assert re.search(words, str(error.value)), str(error.value)
    assert error.value.remedy


def test_a_file_that_is_no_toml_or_missing(file, tmp_path):
    with pytest.raises(ConfigError, match="no TOML"):
        load(file("bytes = = 3"))
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match="more than 1048576 characters"):
        load(Path("/dev/zero"))


@pytest.mark.parametrize(
    ("pool_bytes", "slab_bytes"),
    [(1 << 20, 1 << 20), (256 << 20, 4 << 20), (3 << 30, 32 << 20), (1 << 40, 64 << 20)],
)
def test_slabs_follow_the_pool(pool_bytes, slab_bytes):
    assert config.default_slab_bytes(pool_bytes) == slab_bytes
    assert load(tiers__host__bytes=pool_bytes).config.tiers.host.slab_bytes == slab_bytes


def test_rows_show_values_that_can_be_set_again():
    loaded = load(tiers__host__bytes=(1 << 30) + 1, tiers__host__slab_bytes="1MiB")
    again = {key: Setting(value, "again") for key, value, _ in loaded.rows()}
    assert config.load(None, again, {}).config == loaded.config
    assert ("tiers.host.slab_bytes", "1 MiB", "flag") in loaded.rows()


def test_a_pool_that_does_not_fit_names_the_remedy():
    host = load(tiers__host__bytes="900TiB").config.tiers.host
    with pytest.raises(PoolSegmentError, match=r"900 TiB.*--pool-bytes"):
        config.check_space(host)
    config.check_space(load(tiers__host__bytes="1MiB").config.tiers.host)


def test_an_existing_segment_counts_as_space(monkeypatch, tmp_path):
    host = load(tiers__host__bytes="1MiB", tiers__host__name="pool").config.tiers.host
    monkeypatch.setattr(config, "SHM_DIR", tmp_path)
    full = os.statvfs_result((4096, 4096, 100, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    with pytest.raises(PoolSegmentError):
        config.check_space(host)
    (tmp_path / "pool").write_bytes(b"x" * (1 << 20))
    config.check_space(host)


def test_no_limit_is_below_one():
    with pytest.raises(ValueError, match="ranks_max is 0"):
        Limits(ranks_max=0)


def test_the_documentation_lists_every_key_with_its_default():
    text = (ROOT / "docs" / "configuration.md").read_text()
    text, connector, _ = text.partition("## Connector settings")
    assert connector
    rows = {
        cells[0].strip(" `"): cells
        for line in text.splitlines()
        if line.startswith("| `") and (cells := line.strip("|").split("|"))
    }
    view = config.view(load(run_dir="/run/kvferry", tiers__host__name="kvferry-0").config)
    wrong = []
    for key, value in view.items():
        cells = rows.get(key)
        if cells is None:
            wrong.append(f"{key} is missing")
        elif key.startswith("limits.") and f"`{settings.as_text(key, value)}`" not in cells[1]:
            wrong.append(f"{key}: default is {settings.as_text(key, value)}, not {cells[1]}")
        elif key in FLAGS and FLAGS[key].option not in "|".join(cells):
            wrong.append(f"{key}: {FLAGS[key].option} is not named")
        elif not key.startswith("limits.") and config.env_name(key) not in "|".join(cells):
            wrong.append(f"{key}: {config.env_name(key)} is not named")
    assert not wrong
    assert not [key for key in rows if "." in key and key not in view and key.islower()]


def test_no_setting_turns_a_fence_off():
    """They say how long a word is waited for, and how often it is read."""
    of_fences = {key for key in config.KNOWN if "fence" in key}
    assert of_fences == {"limits.fence_ms_max", "limits.fence_poll_us"}
    assert not [name for name in FerryConfig.__struct_fields__ if "fence" in name]


def test_flags_are_keys():
    assert set(FLAGS) <= set(config.KNOWN)


def test_parse_reads_paths():
    assert settings.parse("run_dir", Path, Setting(Path("/run/x"), "flag")) == "/run/x"
