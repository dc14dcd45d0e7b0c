"""A notice to a web address, as JSON; the address is a secret, and told to nobody."""

import base64
import json
import os
import time
from urllib.parse import unquote, urlsplit, urlunsplit

from loopscope import __version__
from loopscope.alerts.notice import AlertNotice
from loopscope.errors import ConfigError, LoopscopeError

HIDDEN = "***"
"""Stands for what is not told."""

_ENVIRONMENT = "env:"
_TRIES = 3
_PAUSE_S = 0.5
_CONTENT = 1900
"""Characters that every chat service takes in one message."""


class Webhook:
    """POSTs ``{"text": ..., "content": ..., "alert": {the notice's fields}}``, which chat services understand.

    An answer of 2xx is success. Redirects are not followed. Where the server says "not now" (429 or 5xx) or refuses
    the connection, it is tried three times.
    """

    def __init__(self, url: str, *, timeout_s: float) -> None:
        """Take the address, or read it from the environment where `url` is "env:NAME".

        Raises:
            ConfigError: the variable is not set, or holds no web address.
        """
        self._url, self._headers = _without_user(resolve(url))
        self._timeout_s = timeout_s

    def __call__(self, notice: AlertNotice) -> None:
        """Send it.

        Raises:
            LoopscopeError: it was not accepted; says why, without the address.
        """
        end = time.monotonic() + self._timeout_s
        body = payload(notice)
        for left in reversed(range(_TRIES)):
            reason, again = self._post(body, max(0.1, end - time.monotonic()))
            if reason is None:
                return
            pause = _PAUSE_S * (_TRIES - left)
            if not again or not left or time.monotonic() + pause >= end:
                raise LoopscopeError(reason)
            time.sleep(pause)

    def _post(self, body: bytes, timeout_s: float) -> tuple[str | None, bool]:
        """(why it failed or None, whether another try makes sense)."""
        import http.client
        import urllib.error
        import urllib.request

        class NoRedirect(urllib.request.HTTPRedirectHandler):
            def redirect_request(self, *_: object) -> None:
                return None

        try:
            request = urllib.request.Request(self._url, data=body, headers=self._headers, method="POST")
            with urllib.request.build_opener(NoRedirect).open(request, timeout=timeout_s) as answer:
                return (None, False) if 200 <= answer.status < 300 else (f"answered {answer.status}", False)
        except urllib.error.HTTPError as error:
            error.close()
            return f"answered {error.code}", error.code == 429 or error.code >= 500
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                return "did not answer in time", False
            # The words of an error may quote the address; its kind never does.
            number = getattr(reason, "strerror", None) if isinstance(reason, OSError) else None
            return f"{type(reason).__name__}" + (f": {number}" if number else ""), isinstance(
                reason, ConnectionRefusedError
            )


def payload(notice: AlertNotice) -> bytes:
    """The body: a message under the names that chat services read, and the notice's fields."""
    message = notice.message()
    return json.dumps({"text": message, "content": message[:_CONTENT], "alert": notice.plain()}).encode()


def check_url(url: str) -> None:
    """Refuse what is neither a web address nor the name of a variable; never repeats it.

    Raises:
        ConfigError: says what was expected.
    """
    if url.startswith(_ENVIRONMENT):
        if not url.removeprefix(_ENVIRONMENT):
            raise ConfigError(
                "webhook is 'env:', expected env:NAME, an environment variable with the address"
            )
        return
    try:
        parts = urlsplit(url)
        right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        right = right and not any(character.isspace() or ord(character) < 32 for character in url)
    except ValueError:
        right = False
    if not right:
        raise ConfigError(
            "webhook is not a web address, expected http://... or https://..., or env:NAME for an environment "
            "variable that holds one (so that it stands in no command line). It is not repeated here, as it may be a "
            "secret."
        )


def resolve(url: str) -> str:
    """The address, from the environment where it is there.

    Raises:
        ConfigError: the variable is not set, or holds no address.
    """
    if not url.startswith(_ENVIRONMENT):
        return url
    name = url.removeprefix(_ENVIRONMENT)
    found = os.environ.get(name, "")
    if not found:
        raise ConfigError(
            f"webhook is {url!r}, but the environment variable {name} is not set. Set it, or give the URL."
        )
    if found.startswith(_ENVIRONMENT):
        raise ConfigError(f"the environment variable {name} names another variable, expected a web address")
    check_url(found)
    return found


def _without_user(url: str) -> tuple[str, dict[str, str]]:
    """The address as urllib takes it, and the headers; user:password@ becomes one of them."""
    headers = {"Content-Type": "application/json", "User-Agent": f"loopscope/{__version__}"}
    parts = urlsplit(url)
    user, at, place = parts.netloc.rpartition("@")
    if at:
        headers["Authorization"] = "Basic " + base64.b64encode(unquote(user).encode()).decode()
    return urlunsplit(parts._replace(netloc=place, fragment="")), headers


def redacted(url: str) -> str:
    """What may be stored and shown of an address: its scheme and host.

    >>> redacted("https://user:word@hooks.example.org:8443/services/T0/B0/secret?token=x")
    'https://hooks.example.org:8443/***'
    """
    if not url or url.startswith(_ENVIRONMENT):
        return url
    parts = urlsplit(url)
    port = "" if parts.port is None else f":{parts.port}"
    host = parts.hostname or HIDDEN
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}{port}/{HIDDEN}"
