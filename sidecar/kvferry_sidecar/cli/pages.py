"""`kvferry ui`: the page of several nodes, served on this machine."""

from __future__ import annotations

import asyncio
import socket
import sys
from importlib.util import find_spec

import click

from kvferry_sidecar.errors import ConfigError, ExitCode
from kvferry_sidecar.observe.http.guard import read_token
from kvferry_sidecar.observe.http.server import bind_tcp, configured


@click.command()
@click.option(
    "--target",
    "targets",
    required=True,
    metavar="HOST:PORT,...",
    help="The nodes' http.listen addresses, separated by commas. dns+http://NAME:PORT stands for"
    " every address of that name, as of a headless Service; it is looked up again and again.",
)
@click.option("--listen", default="127.0.0.1:9481", show_default=True, metavar="HOST:PORT")
@click.option(
    "--token-file", default="", metavar="FILE", help="The nodes' token: allows their actions."
)
@click.option(
    "--allow-host",
    "names",
    multiple=True,
    metavar="NAME",
    help="A host name under which browsers reach this page, as of a reverse proxy; repeatable.",
)
def ui(targets: str, listen: str, token_file: str, names: tuple[str, ...]) -> int:
    """Serve the page of several nodes on this machine, until it is interrupted.

    Nodes are only read, unless --token-file names the file with their http.token_file's token;
    whoever acts on the page gives it there.
    """
    if find_spec("httpx") is None:
        raise ConfigError("httpx is not installed", "pip install 'kvferry[sidecar,ui]'")
    from kvferry_sidecar.observe.http import fleet  # noqa: PLC0415 - needs httpx

    nodes = fleet.targets_of(targets)
    token = read_token(token_file)
    listener = bind_tcp("--listen", listen)
    where = "{}:{}".format(*listener.getsockname()[:2])
    print(f"http://{where}/ui/ is the page of {', '.join(nodes)}", flush=True)
    app_names = frozenset(name.lower() for name in names)
    asyncio.run(_serve(nodes, token, app_names, listener))
    return ExitCode.OK


async def _serve(
    nodes: list[str], token: str, names: frozenset[str], listener: socket.socket
) -> None:
    import uvicorn  # noqa: PLC0415 - as above

    from kvferry_sidecar.observe.http import fleet, several  # noqa: PLC0415 - needs httpx

    async with several.new_client() as client:
        app = several.application(fleet.Fleet(nodes), client, token, names)
        server = uvicorn.Server(configured(app))
        try:
            await server.serve([listener])
        except KeyboardInterrupt:  # uvicorn raises it again once it has stopped
            sys.stdout.flush()
