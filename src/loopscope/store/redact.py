"""Secrets in a configuration: found by the name of a setting and by the shape of its value, and taken out.

What is kept of a run is read by others: run.json, its copies, trackers, pages, `diff`. So a secret is taken out before
anything of it is written, and again when a document of an older version is read. Which settings it was is said.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import msgspec

REDACTED = "[redacted]"
"""Stands where a secret was."""


class Redacted(NamedTuple):
    """Plain data without secrets."""

    value: Any
    names: tuple[str, ...]
    """The settings that held one, as ``trainer.hub_token`` or ``trainer.argv[3]``."""


# -- by name: the last words of a setting's name, such as `push_to_hub_token` or `awsSecretAccessKey`

_KEYS = (
    "api|access|secret|private|auth|account|signing|encryption|master|shared|storage|subscription|licen[cs]e|ssh|gpg|pgp"
    "|hmac|session|service|deploy|client|server|admin|app|wandb|openai|anthropic|hf|hub|comet|neptune|mlflow|aws|azure"
    "|gcp|google|s3"
)
_WORD = (
    rf"pass|(?:.*_)?(?:[a-z]*pass(?:word|wd|phrase|code)s?|(?:db|user|smtp|http|proxy|ftp|ssh|redis|mysql|pg|root|admin)_?pass"
    rf"|pwd|pw|[a-z]*secrets?|credentials?|creds?|(?:{_KEYS})_?keys?(?:_id)?|authorization|bearer|jwt|cookies?|pat|auth|sas"
    r"|[a-z]*tokens?|webhooks?(?:_ur[il]s?|_address)?|conn(?:ection)?_str(?:ing)?)"
)
_NAME = re.compile(
    rf"{_WORD}(?:_(?:value|str|string|text|raw|plain|b64|base64|hex|old|new|prod|dev|test|\d+))*"
)
_TOKEN = re.compile(r"(?:.*_)?([a-z]*)tokens?(?:_.*)?")
_VOCABULARY = re.compile(
    r"pad|eos|bos|unk|sep|cls|mask|image|img|audio|video|vision|special|added|additional|start|end|stop|boi|eoi|begin|prefix"
    r"|suffix|middle|fim|first|last|next|prev|previous|per|num|n|max|min|total|target|input|output|prompt|new|think|tool"
    r"|decoder|user|assistant|system|role|bad|suppress|forced|valid|dropped|drop|loss|train|seen|word|sub"
)
"""Words before "token" that make it a token of a text."""

_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_CONTAINER = re.compile(r"secrets?|credentials?|creds|passwords?")
_LONGEST_NAME = 200
_COUNTED = re.compile(r"(?:num|n|max|min|count)_.*")
_METHODS = re.compile(
    r"(?i)none|no|off|basic|bearer|digest|ntlm|kerberos|oauth2?|iam|token|anonymous|default|auto|true|false|null"
)
"""Ways to sign in."""
_PATH = re.compile(
    r"(?:~|\.{1,2}|[A-Za-z]:)?[\\/][\w.-]+(?:[\\/][\w.@-]+)+|~?[\w.-]*/?[\w-]+\.(?:pem|json|ya?ml|txt|key|crt|ini)"
)
_MAY_BE_PATH = re.compile(r".*(?:credentials?|creds?|cookies?|auth|secrets?|(?:private|ssh|gpg|pgp)_?key)")
_REFERENCE = re.compile(r"env:\w+|\$[A-Z_][A-Z0-9_]*|\$?\{\{?[^{}]*\}?\}|%[A-Z_][A-Z0-9_]*%")
"""Says where the secret is, and is none."""
_SPECIAL = re.compile(r"\W.*\W|.{0,2}", re.DOTALL)
"""A token of a text: <s>, [PAD], <|end|>."""

# -- by shape

_SHAPES = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:.*?-----END [A-Z ]*PRIVATE KEY-----|.*)"
    r"|(?<![\w-])eyJ[\w-]{8,}+\.[\w-]{8,}(?:\.[\w-]*)?"
    r"|\b(?:hf|api_org|npm|r8|gsk)_(?=[A-Za-z]{0,80}[0-9A-Z])[A-Za-z0-9]{8,}"
    r"|(?<![\w-])(?:gh[pousr]|github_pat|glpat|glptt|pypi|dop_v1|lsv2|wandb_v1|dapi|nvapi|tskey|xai|xapp|xox[abeprs])[-_][\w-]{8,}"
    r"|(?<![\w-])[spr]k[-_](?=[\w-]{0,80}[0-9A-Z])[\w-]{8,}"
    r"|\bA(?:KI|SI)A(?=[A-Z]{0,80}[0-9])[0-9A-Z]{6,}"
    r"|\bAIza[\w-]{16,}|\bya29\.[\w.-]{16,}|\bSG\.[\w-]{16,}\.[\w-]{16,}",
    re.DOTALL,
)
_LONG = re.compile(r"(?<![\w/+=.-])[A-Za-z0-9/+]{32,}+={0,2}(?![\w/+=.-])")
"""Random letters and digits, as keys of clouds are; `_mixed` says whether the letters are of both cases."""
_USERINFO = re.compile(
    r"(?<=://)(?:[^\s/@:?#]{0,500}:(?!\d+(?:[/,;?#]|$))[^\s@]{1,500}|(?<=http://)[^\s/@:?#]{1,500}|(?<=https://)[^\s/@:?#]{1,500})@"
)
_HOOK = re.compile(
    r"(?i)\b(https?://(?:hooks\.[\w.-]+|[\w.-]*(?:\bwebhook\.office\.com|discord(?:app)?\.com/api/webhooks|zapier\.com/hooks)"
    r"|api\.telegram\.org/bot))[^\s\"'<>]{2,}"
)
_SCHEME = re.compile(r"(?i)\b(bearer|basic)(\s+)(?=[\w.~+/=-]{0,80}[\d=A-Z])[\w.~+/-]{8,}=*")
_PAIR = re.compile(
    r"(?<![\w.])(?<![\w.]-)(?P<name>[A-Za-z][\w.-]*+)(?P<gap>[\"']?(?:\s*[=:]\s*|(?<=\w)\s+(?=[^\s-]))[\"']?)"
    r"(?P<value>[^\s\"',;&)}\]]+)"
)
_IN_ADDRESS = re.compile(
    r"(?i)([?&;](?:x-(?:amz|goog)-(?:signature|credential|security-token)|sig|signature|key|code)=)[^&#\s]+"
)


@lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """True where a setting of this name holds a secret, if it holds a text.

    >>> [is_secret_name(name) for name in ("hubToken", "AWS_SECRET_ACCESS_KEY", "pad_token", "num_tokens", "sort_key")]
    [True, True, False, False, False]
    """
    if len(name) > _LONGEST_NAME:
        return False
    plain = _CAMEL.sub("_", name.strip("-\"' ").rpartition(".")[2])
    words = re.sub(r"[^a-z0-9]+", "_", plain.lower()).strip("_")
    if not _NAME.fullmatch(words):
        return False
    # The last "token" decides: its word before it, or the start of its own word (`padtoken`).
    if "token" in words and (found := _TOKEN.fullmatch(words)):
        before = found[1] or words[: found.start(1)].rstrip("_").rpartition("_")[2]
        return not _VOCABULARY.fullmatch(before)
    return True


@lru_cache(maxsize=4096)  # Many runs of a folder have the same settings.
def redact_text(text: str) -> str:
    """The text without what looks like a secret: keys of known services, passwords in addresses and on command lines.

    >>> redact_text("https://me:word@data.example/x?sig=abc --hub-token=hf_x run.py")
    'https://[redacted]@data.example/x?sig=[redacted] --hub-token=[redacted] run.py'
    """
    found = _SHAPES.sub(REDACTED, text)
    if "://" in found:
        found = _USERINFO.sub(f"{REDACTED}@", found)
        found = _HOOK.sub(rf"\1/{REDACTED}", found)
        found = _IN_ADDRESS.sub(rf"\1{REDACTED}", found)
    found = _SCHEME.sub(rf"\1\2{REDACTED}", found)
    if len(found) > 3:
        found = _PAIR.sub(_pair, found)
    return _LONG.sub(_mixed, found)


def redact(given: Any) -> Redacted:
    """Plain data without the secrets in it, whatever depth they are at.

    A value goes where the name of its setting says that it is a secret; of another text, what looks like one. Numbers,
    truth values and null stay, save numbers that a password or secret is named as; so do tokens of a text (`pad_token`)
    and what only says where a secret is (``env:NAME``). What is no plain data becomes what run.json would hold of it.

    Raises:
        TypeError, ValueError: JSON cannot hold it.
    """
    names: list[str] = []
    plain = msgspec.to_builtins(given, enc_hook=str, str_keys=True)
    return Redacted(_walk("", plain, names), tuple(names))


_By = Literal["none", "name", "all"]
"""Why a value is a secret: its own name says so, or that of what it lies in, for everything below."""


def _walk(name: str, given: Any, names: list[str], secret: _By = "none") -> Any:
    if isinstance(given, Mapping):
        return _mapping(name, given, names, secret)
    if isinstance(given, list | tuple):
        return _sequence(name, given, names, secret)
    if isinstance(given, str):
        found = _secret_value(name, given) if secret != "none" else redact_text(given)
    elif secret != "none" and isinstance(given, int) and not isinstance(given, bool) and _holds_numbers(name):
        found = REDACTED
    else:
        return given
    if found != given:
        names.append(name)
    return found


def _mapping(name: str, given: Mapping[str, Any], names: list[str], secret: _By) -> dict[str, Any]:
    # {"name": "API_KEY", "value": ...}, as lists of environment variables have it.
    said = given.get("name", given.get("key"))
    named = isinstance(said, str) and is_secret_name(said)
    # Below `auth` or `token` the inner names decide.
    if secret == "name" and not _CONTAINER.search(_last(name)):
        secret = "none"
    below: _By = "none" if secret == "none" else "all"
    found = {}
    for key, inner in given.items():
        by_name = is_secret_name(key) or (named and key.lower() == "value")
        where = f"{name}.{key}" if name else key
        found[redact_text(key)] = _walk(where, inner, names, "name" if by_name and below == "none" else below)
    return found


def _sequence(name: str, given: list[Any] | tuple[Any, ...], names: list[str], secret: _By) -> list[Any]:
    found = []
    following = False
    for index, inner in enumerate(given):
        by = "name" if following and secret == "none" else secret
        found.append(_walk(f"{name}[{index}]", inner, names, by))
        # `--password word`, and ["API_KEY", "..."] as a pair.
        option = isinstance(inner, str) and (inner.startswith("-") or (len(given) == 2 and index == 0))
        following = option and not re.search(r"[=\s]", inner) and is_secret_name(inner)
    return found


def _secret_value(name: str, value: str) -> str:
    text = value.strip()
    words = _last(name)
    if not text or REDACTED in text or "***" in text or _REFERENCE.fullmatch(text):
        return value
    if "token" in words and (_SPECIAL.fullmatch(text) or _METHODS.fullmatch(text)):
        return value
    if "auth" in words and _METHODS.fullmatch(text):
        return value
    if "hook" in words and "://" not in text:
        return value
    if _MAY_BE_PATH.fullmatch(words) and _PATH.fullmatch(text):
        return redact_text(value)
    if words in ("pwd", "pw") and _PATH.fullmatch(text):
        return redact_text(value)
    return REDACTED


def _last(name: str) -> str:
    """The words of the last setting in a path."""
    return _CAMEL.sub("_", re.sub(r"(?:\[\d+\])+$", "", name).rpartition(".")[2]).lower()


def _holds_numbers(name: str) -> bool:
    words = _last(name)
    return "token" not in words and not _COUNTED.fullmatch(words)


def _mixed(found: re.Match[str]) -> str:
    # A hash has letters of one case, a class's name few digits; the secret keys of S3 have 40 letters.
    text = found[0]
    lower, upper, digits = (len(re.findall(kind, text)) for kind in ("[a-z]", "[A-Z]", "[0-9]"))
    random = lower >= 4 and upper >= 4 and digits >= (1 if len(text) == 40 else 4)
    return REDACTED if random else text


def _pair(found: re.Match[str]) -> str:
    name, gap, value = found["name"], found["gap"], found["value"]
    # A blank alone says something after an option only.
    before = found.string[max(0, found.start() - 1) : found.start()]
    if not re.search(r"[=:]", gap) and before != "-":
        return found[0]
    # In prose ("unexpected token: end"), a plain word is none.
    if re.fullmatch(r":\s+", gap) and re.fullmatch(r"[A-Z]?[a-z]{1,15}", value):
        return found[0]
    if not is_secret_name(name) or value.startswith(("//", "[redacted")) or _METHODS.fullmatch(value):
        return found[0]
    if re.fullmatch(r"[\d.]+", value) and not _holds_numbers(name):
        return found[0]
    kept = _secret_value(name, value)
    return found[0] if kept == value else f"{name}{gap}{kept}"
