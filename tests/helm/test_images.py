"""The images' recipe: linted, pinned, of the package's version, and agreeing with the chart."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sysconfig
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from support.chart import MINIMAL, container, release, values_of
from support.clean_env import BUILD_INPUTS
from support.dockerfile import read_dockerfile
from support.image_packages import canonical, license_of, listed
from support.sources import ROOT

DOCKERFILE = ROOT / "images" / "Dockerfile"
PACKAGE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions(stage, word):
    return [
        one.rest for one in read_dockerfile(DOCKERFILE) if one.stage == stage and one.word == word
    ]


def test_hadolint_finds_nothing():
    command = [Path(sysconfig.get_path("scripts")) / "hadolint", "--no-color", DOCKERFILE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
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


# Licenses that an image may hold unchanged beside our own. OLDAP-2.8 is OpenLDAP's, much like BSD;
# MPL-2.0 binds the files it covers.
ALLOWED = {
    "0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "CC0-1.0", "ISC", "MIT", "MPL-2.0",
    "OLDAP-2.8", "PSF-2.0", "Zlib",
}  # fmt: skip


def default_extras():
    (extras,) = instructions("build", "ARG")
    return extras.removeprefix("EXTRAS=").split(",")


@pytest.mark.parametrize("mooncake", [False, True])
def test_the_list_is_what_the_extras_need(mooncake):
    """By the metadata of what is installed here; tests/release compares with an installation."""
    extras = [*default_extras(), *(["mooncake"] if mooncake else [])]
    open_ = [Requirement(one) for one in PACKAGE["dependencies"]]
    open_ += [
        Requirement(one) for extra in extras for one in PACKAGE["optional-dependencies"][extra]
    ]
    needed = set()
    while open_:
        name = canonical(open_.pop().name)
        if name in needed:
            continue
        needed.add(name)
        further = map(Requirement, importlib.metadata.requires(name) or [])
        open_ += [one for one in further if not one.marker or one.marker.evaluate({"extra": ""})]
    assert set(listed(mooncake=mooncake)) == needed


def test_licenses_are_stated_as_packages_state_them():
    """Of the versions that are listed; this environment may hold others of some."""
    here = [
        (one, importlib.metadata.distribution(one.name)) for one in listed(mooncake=True).values()
    ]
    same = [(one, package) for one, package in here if package.version == one.version]
    assert same
    for one, package in same:
        assert license_of(package) == one.license, one


def test_licenses_are_ones_that_may_be_shipped():
    for one in listed(mooncake=True).values():
        assert set(re.split(r" (?:AND|OR) ", one.license)) <= ALLOWED, one
    packages = json.loads((ROOT / "ui" / "package-lock.json").read_text())["packages"]
    shipped = {name: one for name, one in packages.items() if name and not one.get("dev")}
    assert shipped
    assert {one["license"] for one in shipped.values()} <= ALLOWED
