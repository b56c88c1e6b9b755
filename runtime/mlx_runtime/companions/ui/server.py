"""The server of the page: marimo's, with a token, and headers that keep the page from asking other machines."""

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlx_runtime.cli.verbs import projects
from mlx_runtime.cli.verbs.xp import check_port
from mlx_runtime.companions.ui import storages
from mlx_runtime.config.projects import AN_EXPERIMENT
from mlx_runtime.errors import UsageError
from mlx_runtime.extras import require

DASHBOARD = Path("dashboard.py")
"""The page of an experiment, in its folder. In other folders, a file of this name is not run."""

PACKAGED = projects.template(AN_EXPERIMENT) / "<<cookiecutter.experiment_name>>" / DASHBOARD

POLICY = "; ".join(
    (
        "default-src 'self'",
        "script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:",  # marimo's own scripts; texts of runs are escaped
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "font-src 'self' data:",
        "connect-src 'self'",
        "worker-src 'self' blob:",
        "frame-ancestors 'none'",
        "form-action 'self'",
        "base-uri 'self'",
    )
)
"""Content-Security-Policy: whatever a text of a run may smuggle in, the browser asks no other machine."""

HEADERS = {
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",  # the token is in the first URL
    "x-content-type-options": "nosniff",
}


class Headers:
    """ASGI middleware that adds `HEADERS` to all responses."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = message | {"headers": [*message.get("headers", ()), *added]}
            await send(message)

        await self._app(scope, receive, send_with_headers)


def serve(roots: Sequence[str], *, host: str, port: int, token: str | None, edit: bool) -> None:
    """Serve the page until it is stopped, and print its URL, with a token.

    Raises:
        UsageError: the port is not free; a host that other machines reach without a token that was chosen; or there is
            no dashboard.py to edit.
        MissingLibraryError: Plotly is not installed.
    """
    require("plotly", "the page")
    if host not in ("127.0.0.1", "localhost") and token is None:
        raise UsageError(f"a page on {host} needs a token of your choice: export MLX_UI_TOKEN=$(openssl rand -hex 24)")
    if token is not None and len(token) < 16:
        raise UsageError("MLX_UI_TOKEN needs 16 or more characters: export MLX_UI_TOKEN=$(openssl rand -hex 24)")
    page = DASHBOARD.absolute() if DASHBOARD.is_file() and Path("src/conf.yaml").is_file() else PACKAGED
    if edit and page == PACKAGED:
        raise UsageError(f"there is no {DASHBOARD} in {Path.cwd()}; copy the packaged one: cp '{PACKAGED}' .")
    port = check_port(host, port)
    if not edit:  # otherwise, the page is another process
        storages.begin(roots)
    from marimo._cli.cli import main
    from marimo._server.registry import MIDDLEWARE_REGISTRY
    from starlette.middleware import Middleware

    MIDDLEWARE_REGISTRY.register("mlx", Middleware(Headers))
    secret = token or secrets.token_urlsafe(24)
    print(f"http://{host}:{port}/?access_token={secret if token is None else 'MLX_UI_TOKEN'}", flush=True)
    options = ["--host", host, "--port", str(port), "--token-password", secret, "--headless"]
    arguments = [f"--storage={root}" for root in roots]  # in one word, because marimo looks for "="
    verb = ["edit", "--skip-update-check"] if edit else ["run", "--no-check", "--show-tracebacks"]
    main(["-q", "-y", *verb, "--no-sandbox", *options, str(page), "--", *arguments], prog_name="marimo")
