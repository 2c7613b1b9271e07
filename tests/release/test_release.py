"""What a release is: sdist and wheel as a packager builds them, and the image's own commands."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from kvferry_demo.processes import SHARED_MEMORY, new_pool_name, unlink_pool
from support.clean_env import copy_sources, make_venv, pip_into, run
from support.dockerfile import read_dockerfile
from support.image_packages import Listed, license_of, listed
from support.sources import ROOT
from support.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
HARDENED = "-O2 -g -fstack-protector-strong -D_FORTIFY_SOURCE=2 -Wformat -Werror=format-security"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist, and the wheel from it, in isolation: as `python -m build` does."""
    folder = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-m", "build", "--outdir", str(folder)], ROOT)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("*.whl")
    return path


def test_the_sdist_holds_what_is_built_and_nothing_that_was(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "CMakeLists.txt", "native/src/module.cpp"} <= names
    assert not [one for one in names if one.endswith((".so", ".pyc")) or one.startswith("build/")]


def test_the_demo_runs_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """In an environment of its own; only what is not ours comes from the tests' environment."""
    bin_dir = make_venv(tmp_path / "venv")
    pip_into(bin_dir, "--no-deps", str(wheel))
    python = str(bin_dir / "python")
    shared = [path for path in sys.path if path.endswith("site-packages")]
    site = run([python, "-c", "import site; print(site.getsitepackages()[0])"], tmp_path).strip()
    # A folder named here is searched, but not its own .pth files, which name our editable install.
    Path(site, "shared.pth").write_text("\n".join(shared))
    where = (
        "import kvferry_native, kvferry_connector as c; print(kvferry_native.__file__, c.__file__)"
    )
    assert all(one.startswith(site) for one in run([python, "-c", where], tmp_path).split())
    done = run([python, "-m", "kvferry_demo.run", "--prompts", "2"], tmp_path)
    assert "outputs are identical" in done


def test_a_packager_s_flags_build_a_wheel_that_works(tmp_path: Path) -> None:
    source = copy_sources(tmp_path / "src")
    flags = {"CFLAGS": HARDENED, "CXXFLAGS": HARDENED, "LDFLAGS": "-Wl,-z,relro,-z,now"}
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path)]
    run(command, source, environment=flags)
    (wheel,) = tmp_path.glob("*.whl")
    bin_dir = make_venv(tmp_path / "venv")
    pip_into(bin_dir, f"{wheel}[sidecar]")
    assert "pool format" in run([str(bin_dir / "kvferry"), "version"], tmp_path)


@pytest.fixture(scope="module", params=["sidecar,redis,ui,otel", "sidecar,redis,ui,otel,mooncake"])
def variant(request: pytest.FixtureRequest) -> str:
    """The extras of an image: its default, and the one that the Dockerfile's head names."""
    extras = str(request.param)
    assert f"EXTRAS={extras}" in (ROOT / "images" / "Dockerfile").read_text()
    return extras


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory, variant: str) -> Path:
    """Run the RUN lines of the image's build stage here; return what would be /opt/venv."""
    folder = tmp_path_factory.mktemp("image")
    copy_sources(folder / "src")
    recipe = read_dockerfile(ROOT / "images" / "Dockerfile")
    # What the page's stage makes is copied to where it lies here already.
    for line in (one.rest for one in recipe if one.stage == "page" and one.word == "RUN"):
        run(["bash", "-euc", line], folder / "src" / "ui")
    build = [one for one in recipe if one.stage == "build"]
    lines = [one.rest for one in build if one.word == "RUN" and "apt-get" not in one.rest]
    assert lines
    assert [one.rest.partition("=")[0] for one in build if one.word == "ARG"] == ["EXTRAS"]
    for line in lines:
        here = line.replace("/opt/venv", str(folder / "venv"))
        # The image's python is the one with pip.
        here = re.sub(r"\bpython -m", f"{sys.executable} -m", here)
        run(["bash", "-euc", here], folder / "src", environment={"EXTRAS": variant})
    return folder / "venv"


def test_the_image_holds_exactly_what_is_listed(image: Path, variant: str) -> None:
    (site,) = image.glob("lib/python*/site-packages")
    packages = [
        one for one in importlib.metadata.distributions(path=[str(site)]) if one.name != "kvferry"
    ]
    installed = {str(Listed(one.name, one.version, license_of(one))) for one in packages}
    assert {str(one) for one in listed(mooncake="mooncake" in variant).values()} == installed


def test_the_variant_has_the_client_of_its_store(image: Path, variant: str, tmp_path: Path) -> None:
    """Its wheel is linked to libraries that the Dockerfile installs by apt."""
    code = "import mooncake.store; print(mooncake.store.MooncakeDistributedStore)"
    command = [str(image / "bin" / "python"), "-c", code]
    if "mooncake" in variant:
        assert "MooncakeDistributedStore" in run(command, tmp_path)
    else:
        with pytest.raises(AssertionError, match="No module named 'mooncake'"):
            run(command, tmp_path)


def test_the_image_has_the_page(image: Path) -> None:
    (site,) = image.glob("lib/python*/site-packages")
    page = site / "kvferry_sidecar" / "observe" / "http" / "page"
    assert (page / "index.html").is_file()
    assert not list(site.rglob("node_modules"))


def test_the_image_serves(image: Path, tmp_path: Path) -> None:
    """Its entry point, as the chart calls it: with a configuration file.

    Traces refuse to start where OpenTelemetry's packages are missing; the discard port takes none.
    """
    name = new_pool_name("image")
    run_dir = tmp_path / "run"
    file = tmp_path / "kvferry.toml"
    file.write_text(
        f'run_dir = "{run_dir}"\ntiers.host.name = "{name}"\ntiers.host.bytes = "64MiB"\n'
        'traces.endpoint = "http://127.0.0.1:9/v1/traces"\n'
    )
    kvferry = str(image / "bin" / "kvferry")
    process = subprocess.Popen([kvferry, "serve", "--config", str(file)])

    def answers() -> bool:
        assert process.poll() is None
        status = [kvferry, "status", "--json", "--run-dir", str(run_dir)]
        return subprocess.run(status, capture_output=True, check=False).returncode == 0

    try:
        wait_until(answers, "the image's sidecar answers", every_s=0.2)
        assert (SHARED_MEMORY / name).exists()
        process.terminate()
        assert process.wait(90) == 0
    finally:
        process.kill()
        process.wait()
        unlink_pool(name)
