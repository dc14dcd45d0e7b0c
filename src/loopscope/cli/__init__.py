"""The command `loopscope`: one verb per file, loaded only when it is asked for.

A verb is a frozen keyword-only dataclass: its fields are the flags, its `run()` returns the exit status:
0 it did what was asked, 1 what was checked is wrong, 2 the question was wrong.
"""

import difflib
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from loopscope import __version__
from loopscope.errors import (
    CheckpointMismatchError,
    ConfigError,
    LoopscopeError,
    NotARunError,
    RunExistsError,
)

_QUESTION_WAS_WRONG = (ConfigError, NotARunError, RunExistsError, CheckpointMismatchError)

# What each extra brings, for the message where it is not installed.
_EXTRAS = {
    "torch": "train",
    "torchtitan": "train",
    "jaxtyping": "train",
    "tokenizers": "train",
    "transformers": "transformers",
    "mlx": "mlx",
    "mlx_lm": "mlx",
    "altair": "report",
    "jinja2": "report",
    "markupsafe": "report",
    "vl_convert": "report",
    "starlette": "service",
    "uvicorn": "service",
}


# Adding a verb is a file, a line here and a mirrored test.
_VERBS = {
    "train": "Train with torchtitan, recording every step.",
    "toy": "Train a tiny model and prove that nothing leaks.",
    "summary": "Show what a run saw, in the terminal.",
    "report": "Write what a run saw as one HTML file.",
    "diff": "Compare two runs: settings, then metrics.",
    "watch": "Watch a run in the terminal while it trains.",
    "alerts": "Print the alert rules, or a run's alerts.",
    "serve": "Serve a page and an API over all runs of a folder.",
    "metrics": "List every metric with its formula.",
    "verify": "Check every part and row of a run.",
    "seal": "Turn a run's journals into Parquet parts.",
    "compact": "Merge a run's parts into fewer, larger ones.",
    "schemas": "Print the tables and their columns.",
    "generate": "Write the repository's generated files, or check them.",
    "corpus": "Build or verify a probe corpus.",
    "probe": "Probe finished checkpoints; compare two of them.",
    "support": "List the settings that a backend does not honour.",
    "capabilities": "List the metrics that a model can give.",
    "plan": "Print what would be captured where in a model.",
}
# A verb's class is the verb with a capital letter, but for:
_CLASSES = {"corpus": "CorpusVerb"}


_USAGE = (
    "usage: loopscope VERB [flags]\n\n"
    "Watches the training of looped Mixture-of-Experts transformers, and of any other MoE.\n\n"
    "verbs:\n" + "\n".join(f"  {name:<13}{help}" for name, help in _VERBS.items()) + "\n\n"
    "`loopscope VERB --help` explains every flag; `loopscope --version` prints the version.\n"
    "exit status: 0 it did what was asked, 1 what was checked is wrong, 2 the question was wrong."
)


def _fail(text: str, status: int) -> int:
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)
    return status


def _print_anything() -> None:
    """A letter that the terminal's encoding lacks becomes a question mark, and ends no command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")


def _load(name: str) -> Any:
    return getattr(import_module(f"loopscope.cli.{name}"), _CLASSES.get(name, name.capitalize()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status.

    Args:
        arguments: what follows the program's name; None takes the process's own.
    """
    _print_anything()
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given:
        return _fail(_USAGE, 2)
    name, *rest = given
    if name in ("-h", "--help", "help", "--version"):
        print(f"loopscope {__version__}" if name == "--version" else _USAGE)
        return 0
    if name not in _VERBS:
        near = "".join(f" Did you mean {verb!r}?" for verb in difflib.get_close_matches(name, _VERBS, n=1))
        return _fail(f"loopscope: no verb {name!r}; expected one of {', '.join(_VERBS)}.{near}", 2)
    try:
        import tyro

        return int(tyro.cli(_load(name), prog=f"loopscope {name}", args=rest).run())
    except LoopscopeError as error:
        return _fail(f"loopscope {name}: {error}", 2 if isinstance(error, _QUESTION_WAS_WRONG) else 1)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        return _fail(
            f"loopscope {name}: needs {package}, which is not installed. Install it with "
            f"`pip install 'loopscope[{_EXTRAS[package]}]'`.",
            2,
        )
    except KeyboardInterrupt:
        return _fail(f"loopscope {name}: interrupted", 130)
    except BrokenPipeError:
        # The reader of our output went away, as `| head` does; Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
