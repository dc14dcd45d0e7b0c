"""What is stored: no outputs, no traces of the machine they were written on, public names only."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest
from notebook_cells import FOLDER, NOTEBOOKS, load


def sources(path: Path) -> str:
    code = ("".join(cell["source"]) for cell in load(path)["cells"] if cell["cell_type"] == "code")
    return "\n".join(code)


def test_all_six_are_there_and_listed() -> None:
    names = {path.stem for path in NOTEBOOKS}
    assert names == {
        "a_thousand_runs", "comparing_two_runs", "first_look", "is_my_loop_converging", "joining_with_wandb",
        "which_experts_die",
    }  # fmt: skip
    listed = re.findall(r"\((\w+)\.ipynb\)", (FOLDER / "README.md").read_text(encoding="utf-8"))
    assert set(listed) == names


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
class TestNotebook:
    def test_it_is_stored_without_outputs(self, path: Path) -> None:
        notebook = load(path)
        for cell in notebook["cells"]:
            assert set(cell["metadata"]) == set()
            if cell["cell_type"] == "code":
                assert cell["outputs"] == []
                assert cell["execution_count"] is None
        kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
        assert notebook["metadata"] == {"kernelspec": kernel, "language_info": {"name": "python"}}

    def test_it_names_no_place_of_one_machine(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"/(home|root|work|tmp|usr|mnt|Users)/|[A-Z]:\\\\", text)

    def test_it_explains_every_picture(self, path: Path) -> None:
        """A cell that draws comes after one that says what healthy looks like, or how to read it."""
        said = ""
        for cell in load(path)["cells"]:
            text = "".join(cell["source"])
            if cell["cell_type"] == "markdown":
                said = text
            elif "alt.Chart(" in text and "def " not in text:
                assert "*Healthy*" in said or "*How to read it*" in said or "sample run" in said, text

    def test_it_imports_public_names_only(self, path: Path) -> None:
        tree = ast.parse(sources(path))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "loopscope":
                assert node.module in ("loopscope", "loopscope.analysis")
                assert {alias.name for alias in node.names} <= set(import_module(node.module).__all__)
            if isinstance(node, ast.Import):
                assert not any(alias.name.startswith("loopscope.") for alias in node.names)

    def test_its_first_code_cell_takes_the_users_run(self, path: Path) -> None:
        first = next(cell for cell in load(path)["cells"] if cell["cell_type"] == "code")
        assert "LOOPSCOPE_RUN" in "".join(first["source"])
