"""Shapes and dtypes are checked at run time in tests: jaxtyping's annotations, enforced by beartype."""

from __future__ import annotations

from jaxtyping import install_import_hook

# Only packages whose functions take and return tensors; everything else is mypy's business.
_CHECKED = ("loopscope.metrics", "loopscope.trace")

# Held for the whole session: the hook must be in place before the first import of these packages.
_HOOK = install_import_hook(_CHECKED, "beartype.beartype")
