"""The images' recipe: linted, pinned, of the package's version, and agreeing with the chart."""

from __future__ import annotations

import json
import re
import subprocess
import sysconfig
import tomllib
from pathlib import Path

from support.chart import MINIMAL, container, release, values_of
from support.clean_env import BUILD_INPUTS
from support.dockerfile import read_dockerfile
from support.sources import ROOT

DOCKERFILE = ROOT / "images" / "Dockerfile"
PACKAGE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions(stage, word):
    return [
        one.rest for one in read_dockerfile(DOCKERFILE) if one.stage == stage and one.word == word
    ]


def test_hadolint_finds_nothing():
    command = [Path(sysconfig.get_path("scripts")) / "hadolint", "--no-color", DOCKERFILE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_bases_are_pinned_to_one_release():
    bases = {one.rest.split()[0] for one in read_dockerfile(DOCKERFILE) if one.word == "FROM"}
    assert "scratch" in bases
    for base in bases - {"scratch"}:
        assert re.fullmatch(r"\w+:\d+\.\d+\.\d+(-bookworm)?-slim(-bookworm)?", base)


def test_the_sidecar_runs_as_nobody_special():
    assert instructions("sidecar", "USER") == ["10001:10001"]
    assert values_of("minimal") is MINIMAL
    assert release("minimal").sidecar_pod()["securityContext"]["runAsUser"] == 10001


def test_versions_and_license_are_the_package_s():
    for stage in ("connector", "sidecar"):
        (labels,) = instructions(stage, "LABEL")
        assert f'image.version="{PACKAGE["version"]}"' in labels
        assert f'image.licenses="{PACKAGE["license"]}"' in labels
    named = re.findall(r"-t \S+?:([\d.]+)", DOCKERFILE.read_text())
    assert set(named) == {PACKAGE["version"]}


def test_chart_and_image_name_the_same_paths():
    pod = release("minimal").sidecar_pod()
    source = container(pod, "connector")["command"][2]
    copies = [one.split() for one in instructions("sidecar", "COPY")]
    assert ["connector/kvferry_connector", source] in copies
    assert json.loads(instructions("sidecar", "ENTRYPOINT")[0]) == ["kvferry"]
    assert container(pod, "kvferry")["args"][0] == "serve"


def test_the_context_is_what_the_build_reads():
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert tuple(line[1:] for line in lines if line.startswith("!")) == BUILD_INPUTS
    assert "**/*.so" in lines, "a library built here must not reach an image"


def canonical(name):
    return name.strip().lower().replace("_", "-")


def test_every_dependency_of_the_image_is_pinned():
    """tests/release compares the whole set with a real installation."""
    lines = (ROOT / "images" / "constraints.txt").read_text().splitlines()
    pinned = {canonical(line.partition("==")[0]) for line in lines if "==" in line}
    (extras,) = instructions("build", "ARG")
    wanted = list(PACKAGE["dependencies"])
    for extra in extras.removeprefix("EXTRAS=").split(","):
        wanted += PACKAGE["optional-dependencies"][extra]
    names = {canonical(re.split(r"[\[<>=;]", one)[0]) for one in wanted}
    assert names <= pinned, "add them to images/constraints.txt"
