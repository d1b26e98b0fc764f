"""HTTP server of the page: `/`, its data as `/state.json`, and `/metrics` for Prometheus.

1. On loopback the page needs no token, but the Host header must be a local name. This protects against web sites whose
   name resolves to this machine (DNS rebinding).
2. On other addresses, TLS and a token are required. The token comes in the link (`?token=`) or as `Authorization:
   Bearer`. The server moves a token from the link to a cookie immediately.
3. The page is read-only; the server supports only GET.
4. The page is one response without external resources. Its headers forbid the browser to load any.
"""

from __future__ import annotations

import gzip
import hmac
import json
import logging
import secrets
import ssl
import threading
import time
from functools import cache
from http import HTTPStatus
from http.cookies import SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from types import TracebackType
from typing import cast
from urllib.parse import parse_qs, urlsplit

from lightning_diloco.errors import ConfigError
from lightning_diloco.live import metrics
from lightning_diloco.live.watch import Watch
from lightning_diloco.transport.address import is_loopback, split_host_port
from lightning_diloco.transport.identity import ServerIdentity

log = logging.getLogger(__name__)

COOKIE = "diloco"
_LOCAL_NAMES = ("127.0.0.1", "localhost", "[::1]")
_RECENTLY_S = 3.0
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def check_address(listen: str) -> None:
    """Check that a page can be served at host:port.

    Raises:
        ConfigError: the address cannot be used.
    """
    _bound(listen, Watch(""), None).server_close()


class PageServer:
    """Context manager that serves the page of one run.

    Args:
        watch: the run.
        listen: host:port; port 0 chooses a free port.
        identity_dir: folder of the certificate, which is used on addresses other than loopback.
        linger_s: how long the exit waits for an open page to fetch the final state.

    Raises:
        ConfigError: the address cannot be used.
    """

    def __init__(self, watch: Watch, listen: str, *, identity_dir: Path, linger_s: float = 0.0) -> None:
        host, _ = split_host_port(listen)
        self._linger_s = linger_s
        self.token = None if is_loopback(host) else secrets.token_urlsafe(24)
        self._server = _bound(listen, watch, self.token)
        if self.token is not None:
            ServerIdentity.load_or_create(identity_dir)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(identity_dir / "identity.pem")
            # Each connection's thread does its own handshake, so a silent client blocks no other.
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        scheme, query = ("http", "") if self.token is None else ("https", f"?token={self.token}")
        self.url = f"{scheme}://{host}:{self._server.server_port}/{query}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="diloco-page", daemon=True)

    def __enter__(self) -> PageServer:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        left_s = time.monotonic()
        while kind is None and self._server.is_awaited_since(left_s) and time.monotonic() < left_s + self._linger_s:
            time.sleep(0.05)
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], watch: Watch, token: str | None) -> None:
        self.watch, self.token = watch, token
        self.asked_s = self.told_s = 0.0  # time of the last state request, and of the last one that was answered
        super().__init__(address, _Handler)

    def is_awaited_since(self, left_s: float) -> bool:
        """Return whether a page is open that has not fetched the state since this time."""
        return self.asked_s > left_s - _RECENTLY_S and self.told_s < left_s

    def handle_error(self, request: object, client_address: object) -> None:
        log.debug("a caller of the page went away", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 30.0

    @property
    def _page(self) -> _Server:
        return cast("_Server", self.server)

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        given = parse_qs(asked.query).get("token", [""])[0]
        if not self._is_allowed(given):
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", b"open the printed link, which includes ?token=\n")
        elif given and self._page.token is not None:
            keep = f"{COOKIE}={given}; Path=/; HttpOnly; Secure; SameSite=Strict"
            self._answer(HTTPStatus.SEE_OTHER, "text/plain", b"", {"Location": asked.path, "Set-Cookie": keep})
        elif asked.path == "/":
            self._answer(HTTPStatus.OK, "text/html; charset=utf-8", page())
        elif asked.path == "/state.json":
            self._page.asked_s = asked_s = time.monotonic()
            self._answer(HTTPStatus.OK, "application/json", json.dumps(_finite(self._page.watch.state())).encode())
            self._page.told_s = asked_s
        elif asked.path == "/metrics":
            self._answer(HTTPStatus.OK, metrics.CONTENT_TYPE, metrics.exposition(self._page.watch.status))
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"there are /, /state.json and /metrics\n")

    def _is_allowed(self, given: str) -> bool:
        if (token := self._page.token) is None:
            return self.headers.get("Host", "").rpartition(":")[0] in _LOCAL_NAMES
        cookie = SimpleCookie(self.headers.get("Cookie", "")).get(COOKIE)
        bearer = self.headers.get("Authorization", "").removeprefix("Bearer ")
        shown = (given, bearer, cookie.value if cookie else "")
        return any(hmac.compare_digest(one.encode(), token.encode()) for one in shown)

    def _answer(self, status: HTTPStatus, kind: str, body: bytes, headers: dict[str, str] | None = None) -> None:
        if len(body) > 1400 and "gzip" in self.headers.get("Accept-Encoding", ""):
            body, headers = gzip.compress(body, 1), {**(headers or {}), "Content-Encoding": "gzip"}
        self.send_response(status)
        for name, value in {**_HEADERS, **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *words: object) -> None:
        log.debug(format, *words)


@cache
def page() -> bytes:
    """Return the page with inline style and script."""
    here = files(__package__)
    html, style, script = ((here / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js"))
    return html.replace("/* style */", style).replace("/* script */", script).encode()


def _finite(value: object) -> object:
    """Replace NaN and infinity, which JSON does not have, by None; the page shows them as unknown."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def _bound(listen: str, watch: Watch, token: str | None) -> _Server:
    try:
        return _Server(split_host_port(listen), watch, token)
    except OSError as error:
        raise ConfigError(
            f"{listen}: the page cannot be served there ({error.strerror}); an address of this machine with a free "
            "port is needed, such as 127.0.0.1:0"
        ) from error
