"""Shapes and dtypes are checked at run time in tests: jaxtyping's annotations, enforced by beartype."""

from __future__ import annotations

import os

from hypothesis import settings
from jaxtyping import install_import_hook

# Only packages whose functions take and return tensors; everything else is mypy's business.
_CHECKED = ("loopscope.metrics", "loopscope.trace")

# Held for the whole session: the hook must be in place before the first import of these packages.
_HOOK = install_import_hook(_CHECKED, "beartype.beartype")

# A change must not fail for an input that another change's run happened upon: continuous integration tries the
# same examples every time, everybody else new ones.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
