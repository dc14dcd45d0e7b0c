"""The notebooks' cells, and a way to run them outside a kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))

# Cells one after the other in an interactive shell without a front end: what a cell ends with is drawn, as in a kernel.
_RUN = """
import sys
blocked = set(sys.argv[2].split(","))

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r} (blocked by the test)", name=name)

if blocked != {""}:
    sys.meta_path.insert(0, Blocker())
    import importlib.util
    find = importlib.util.find_spec
    importlib.util.find_spec = lambda name, package=None: None if name in blocked else find(name, package)

import json
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
shell.user_ns["__name__"] = "__main__"
for number, cell in enumerate(json.load(open(sys.argv[1], encoding="utf-8"))["cells"], start=1):
    if cell["cell_type"] == "code":
        done = shell.run_cell("".join(cell["source"]))
        if not done.success:
            print(f"cell {number} of {sys.argv[1]} failed", file=sys.stderr)
            sys.exit(1)
        if done.result is not None:
            formats, _ = shell.display_formatter.format(done.result)
            print("DREW", sorted(formats))
print("TORCH", "torch" in sys.modules)
"""


def load(path: Path) -> dict[str, Any]:
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return notebook


def execute(name: str, home: Path, *, without: tuple[str, ...] = (), **variables: str) -> str:
    """Run a notebook's cells in a process of its own, which may write into `home` alone; its output."""
    for folder in ("home", "tmp"):
        (home / folder).mkdir(parents=True, exist_ok=True)
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("LOOPSCOPE_", "WANDB_"))},
        "HOME": str(home / "home"), "TMPDIR": str(home / "tmp"), "IPYTHONDIR": str(home / "ipython"),
        "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "LOOPSCOPE_RUNS": str(home / "no runs"), **variables,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", _RUN, f"{name}.ipynb", ",".join(without)], cwd=FOLDER, env=environment, text=True,
        capture_output=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
