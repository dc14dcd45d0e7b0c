"""`loopscope serve ROOT`: a page, an API and Prometheus gauges over all runs of a folder."""

import contextlib
import ipaddress
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from loopscope.cli.flags import RuleFlags
from loopscope.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Serve(RuleFlags):
    """Serve the runs below a folder, live ones included, to a browser and to monitoring. Reads only.

    Listens on this machine alone. Anything else needs --allow-remote, and whoever asks needs the token: it is taken
    from the environment variable LOOPSCOPE_TOKEN, or made and printed.
    """

    root: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="ROOT")]
    """Folder that holds runs, up to four levels down."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8321
    """Port to listen on; 0 takes a free one."""
    allow_remote: bool = False
    """Listen on an address that other machines reach."""

    def run(self) -> int:
        """Serve until interrupted; 0.

        Raises:
            ConfigError: `root` is no folder, or the address needs a flag.
        """
        import uvicorn

        from loopscope.service import make_app

        remote = not _is_loopback(self.host)
        if remote and not self.allow_remote:
            raise ConfigError(
                f"--host is {self.host}, which other machines may reach, expected a loopback address. Leave it out, or "
                "add --allow-remote: a token is then asked for."
            )
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port is {self.port}, expected 0 to 65535. Change --port.")
        token = (os.environ.get("LOOPSCOPE_TOKEN") or secrets.token_urlsafe(24)) if remote else None
        app = make_app(self.root, token=token, settings=self.bounds())
        config = uvicorn.Config(app, host=self.host, port=self.port, log_level="warning", access_log=False)
        listening = config.bind_socket()
        # From now on a connection waits instead of being refused: whoever reads the address may use it at once.
        listening.listen()
        host = f"[{self.host}]" if ":" in self.host else self.host
        query = f"?token={token}" if token else ""
        print(f"http://{host}:{listening.getsockname()[1]}/{query}", flush=True)
        # It shuts down on Ctrl-C, and then hands the interruption on.
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listening])
        return 0


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    return False
