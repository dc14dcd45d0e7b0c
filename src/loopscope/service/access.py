"""Who may ask: this machine alone, or whoever knows the token."""

import secrets
from urllib.parse import parse_qs

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_COOKIE = "loopscope_token"
_HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"x-frame-options": b"DENY",
    b"cross-origin-resource-policy": b"same-origin",
    b"cache-control": b"no-store",
}


class Guard:
    """ASGI middleware: checks the host or the token, and adds the headers that every answer has.

    Args:
        app: answers.
        token: asked for in `Authorization: Bearer`, or once as ?token=, which becomes a cookie. Without one only
            requests that name this machine are answered, which keeps other sites' pages out.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or hand on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name.lower() for name, _ in message["headers"]}
                message["headers"] = [
                    *message["headers"], *((n, v) for n, v in _HEADERS.items() if n not in given)
                ]  # fmt: skip
            await send(message)

        await (self._refusal(scope) or self._app)(scope, receive, with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        token = self._token
        if token is None:
            host = headers.get("host", "")
            name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
            if name.strip("[]") in ("127.0.0.1", "localhost", "::1"):
                return None
            return PlainTextResponse("This service answers to 127.0.0.1 and localhost only.\n", 403)
        if secrets.compare_digest(headers.get("authorization", "").encode(), f"Bearer {token}".encode()):
            return None
        cookies = dict(c.strip().partition("=")[::2] for c in headers.get("cookie", "").split(";"))
        if secrets.compare_digest(cookies.get(_COOKIE, "").encode(), token.encode()):
            return None
        given = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [""])[0]
        if secrets.compare_digest(given.encode(), token.encode()):
            # The token leaves the address, where it would be seen and kept.
            answer = RedirectResponse("/" + scope["path"].lstrip("/\\"), 303)
            answer.set_cookie(_COOKIE, token, httponly=True, samesite="strict")
            return answer
        return PlainTextResponse("A token is needed: open the address that was printed at the start.\n", 401)
