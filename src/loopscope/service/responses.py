"""Answers whose text strangers chose: a name that is no valid text is answered with signs in its place, not refused."""

import json
from typing import Any

from starlette.responses import JSONResponse


def encoded(text: str) -> bytes:
    """UTF-8, whatever is in the text: a folder's name need not be valid, nor need a name in run.json.

    >>> encoded("a\\udcff")
    b'a?'
    """
    return text.encode("utf-8", "replace")


class Json(JSONResponse):
    """JSON without NaN and infinities, which most readers refuse."""

    def render(self, content: Any) -> bytes:
        """As text."""
        return encoded(json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")))
