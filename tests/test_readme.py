"""The README's examples are Python, and import what exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_there_are_examples() -> None:
    assert len(BLOCKS) >= 3


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_an_example_imports_what_exists(block: str) -> None:
    from loopscope.models import cpu_compat

    cpu_compat.enable()
    imports = [node for node in ast.parse(block).body if isinstance(node, ast.Import | ast.ImportFrom)]
    exec(compile(ast.Module(imports, []), "README.md", "exec"), {})


def test_the_example_for_ones_own_model_gives_rows() -> None:
    """Runs the README's own lines in a model that returns what they expect."""
    import torch

    from loopscope import ACTIVE_TRACE_SINK, reduce_trace

    block = next(block for block in BLOCKS if "ACTIVE_TRACE_SINK.record" in block)
    head, methods = block.split("def trace_meta", 1)
    loop = "def forward(self, h):\n" + "\n".join(
        "    " + line for line in head.splitlines() if not line.startswith(("from ", "#"))
    )
    imports = "\n".join(line for line in head.splitlines() if line.startswith("from "))
    space: dict[str, object] = {}
    exec(compile(f"{imports}\n{loop}\n    return h\ndef trace_meta{methods}", "README.md", "exec"), space)

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = torch.nn.Linear(8, 4)

        def forward(self, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
            logits = self.gate(h)
            probs = logits.softmax(-1)
            weights, idx = probs.topk(2)
            return h + 0.1 * h.roll(1, -1), logits, probs, idx, weights / weights.sum(-1, keepdim=True)

    class Model:
        R, L, E, k = 3, 2, 4, 2
        blocks = (Block(), Block())
        forward, trace_meta, expected_visits = (
            space[name] for name in ("forward", "trace_meta", "expected_visits")
        )

    model = Model()
    ACTIVE_TRACE_SINK.arm()
    try:
        model.forward(torch.randn(2, 5, 8))
    finally:
        window = ACTIVE_TRACE_SINK.disarm()
    rows = reduce_trace(window, model.trace_meta())
    assert [row["unrolled_pos"] for row in rows["router"]] == [
        spec.unrolled_pos for spec in model.expected_visits()
    ]
    assert {sum(row["expert_count"]) for row in rows["router"]} == {2 * 5 * 2}
    window.clear()
