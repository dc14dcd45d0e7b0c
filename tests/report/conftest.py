"""The script bundle takes seconds to make; most tests do not draw."""

import pytest

from loopscope.report import page


@pytest.fixture
def no_bundle(monkeypatch):
    monkeypatch.setattr(page, "script_bundle", lambda: "/* no script */")
