"""No module of loopscope imports itself in a circle, whatever stands under TYPE_CHECKING or inside a function."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import grimp


def circles(imports: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """The strongly connected components of more than one node, by Tarjan's algorithm."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        number[node] = lowest[node] = len(number)
        stack.append(node)
        for other in imports[node]:
            if other not in number:
                visit(other)
                lowest[node] = min(lowest[node], lowest[other])
            elif other in stack:
                lowest[node] = min(lowest[node], number[other])
        if lowest[node] == number[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                found.append(sorted(component))

    for node in imports:
        if node not in number:
            visit(node)
    return found


def test_a_circle_is_found() -> None:
    imports = {"a": "b", "b": "cd", "c": "a", "d": "e", "e": "", "f": "ef"}
    assert circles(imports) == [["a", "b", "c"]]


def test_no_module_imports_itself_in_a_circle() -> None:
    graph = grimp.build_graph("loopscope", exclude_type_checking_imports=False, cache_dir=None)
    imports = {
        module: sorted(graph.find_modules_directly_imported_by(module)) for module in sorted(graph.modules)
    }
    assert sum(map(len, imports.values())) > 500
    assert circles(imports) == []
