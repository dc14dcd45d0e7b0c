"""What needs no torch must not import it: a reader of runs installs 320 MB, not 6 GB."""

from __future__ import annotations

import subprocess
import sys

import pytest

# torch is made unimportable, so that an import inside a function is caught as well.
_WITHOUT_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "torchtitan", "jaxtyping", "tokenizers", "datasets", "transformers"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
"""


def _run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _WITHOUT_TORCH + code],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize(
    "code",
    [
        "import loopscope; loopscope.__all__; loopscope.errors.ConfigError",
        "from loopscope import open_run",
        "import loopscope.store, loopscope.analysis, loopscope.probe",
        "from loopscope.probe import load_corpus; load_corpus('core')",
        "from loopscope.integrations.torchtitan import text; text.stdlib_files(10_000)",
        "import loopscope.cli.summary, loopscope.cli.train, loopscope.cli.torchrun",
        "from loopscope.cli import main; assert main(['--help']) == 0",
        "from loopscope.cli import main; assert main(['--version']) == 0",
    ],
)
def test_needs_no_torch(code: str) -> None:
    done = _run(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("verb", ["train", "summary", "verify", "seal", "compact", "schemas"])
def test_help_of_a_verb_needs_no_torch(verb: str) -> None:
    done = _run(f"from loopscope.cli import main; main(['{verb}', '--help'])")
    assert done.returncode == 0, done.stderr
    assert "--help" in done.stdout


def test_a_verb_that_needs_torch_says_what_to_install() -> None:
    done = _run("from loopscope.cli import main; sys.exit(main(['toy', '--out', 'x']))")
    assert done.returncode == 2, done.stderr
    assert "pip install 'loopscope[train]'" in done.stderr
    assert "Traceback" not in done.stderr
