"""Packages of other people, by the recipes of `docs/recipes/`: rows equal to our own hooks?

    scripts/bench recipes [--environment DIR] [--only latent-moe ...]

Makes an environment that sees this one's packages, installs each package into it without its dependencies (and the few
that are missing), and runs its recipe in a process of its own: the block of the page as it stands, five steps on random
tokens, every row against hooks on the experts' inputs and the blocks' outputs, every loss against the same training
without loopscope. Exits with 1 where one is not equal, or has more than ten lines.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/recipes/README.md"
PACKAGES: dict[str, tuple[str, ...]] = {
    "open-mythos": ("open-mythos==0.5.0",),
    "log-depth-recurrent-modeling": ("log-depth-recurrent-modeling==0.1.5", "torch-einops-utils", "x-mlps-pytorch",
                                     "assoc-scan", "einx", "frozendict"),
    "rlt-pytorch": ("rlt-pytorch==0.1.9", "rotary-embedding-torch", "x-mlps-pytorch", "torch-einops-utils", "einx",
                    "frozendict"),
    "spiral-lm": ("spiral-lm==0.1.1",),
    "latent-moe": ("latent-moe==0.0.3",),
    "st-moe-pytorch": ("st-moe-pytorch==0.1.8", "colt5-attention", "local-attention", "hyper-connections"),
    "mixture-of-experts": ("mixture-of-experts==0.2.3",),
    "soft-mixture-of-experts": ("soft-mixture-of-experts==0.2.0",),
    "mixturekit": ("mixturekit==1.1.1",),
    "nanbeige-mlx": ("nanbeige-mlx==0.2.1",),
}  # fmt: skip
"""Package → what is installed for it, without dependencies: torch and transformers stay those of this environment."""


def environment(folder: Path) -> Path:
    """A Python whose packages are this one's and those of `folder`."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        own = subprocess.run(
            [str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
            check=True, capture_output=True, text=True,
        ).stdout.strip()  # fmt: skip
        (Path(own) / "shared.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return python


def installed(python: Path, packages: tuple[str, ...]) -> str:
    """Install what is missing; pip's complaint, or nothing."""
    command = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", *packages]
    done = subprocess.run(command, capture_output=True, text=True)
    return "" if done.returncode == 0 else (done.stdout + done.stderr)[-500:]


def run(python: Path, name: str) -> dict[str, Any]:
    """The findings of one recipe."""
    if error := installed(python, PACKAGES[name]):
        return {"package": name, "ok": False, "error": f"not installed: {error}"}
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [str(python), str(ROOT / "scripts/benches/lib/recipe_run.py"), name, str(PAGE)],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        found = {"package": name, "ok": False, "error": done.stderr[-1200:]}
    return found


def main() -> int:
    """Run the recipes and print what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--environment", type=Path, help="keep it here, and take it if it is there")
    parser.add_argument("--only", choices=list(PACKAGES), nargs="+", default=list(PACKAGES))
    options = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        python = environment(options.environment or Path(folder))
        print(f"{'package':<30} {'lines':>5} {'visits':>6} {'routed':>6}  counts  norms   places  losses")
        for name in options.only:
            found.append(row := run(python, name))
            parts = [str(row.get(kind, "-")) for kind in ("counts", "norms", "places", "losses")]
            columns = "  ".join(f"{part:<6}" for part in parts)
            numbers = f"{row.get('lines', '-'):>5} {row.get('visits', '-'):>6} {row.get('routed', '-'):>6}"
            print(f"{name:<30} {numbers}  {columns}", flush=True)
            for problem in [*filter(None, [row.get("error")]), *row.get("events", [])]:
                print(f"    {problem}", flush=True)
    equal = [row["package"] for row in found if row["ok"]]
    print(json.dumps({"bench": "recipes", "recipes": len(found), "equal": len(equal), "packages": equal}))
    return 0 if len(equal) == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
