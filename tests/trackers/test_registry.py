import importlib.metadata
import sys
import types

import pytest
from tracker_helpers import Remembering

from loopscope import Loopscope
from loopscope.errors import ConfigError, UnsupportedError
from loopscope.trackers import registry


def register(monkeypatch, name, value):
    point = importlib.metadata.EntryPoint(name, value, registry.ENTRY_POINTS)
    monkeypatch.setattr(
        registry, "entry_points", lambda group: [point] if group == registry.ENTRY_POINTS else []
    )
    registry.known_trackers.cache_clear()


@pytest.fixture(autouse=True)
def _forget():
    yield
    registry.known_trackers.cache_clear()


def test_a_tracker_is_one_file():
    assert registry.known_trackers() == ("tensorboard", "wandb")
    for name in registry.known_trackers():
        assert callable(registry.backend(name).start)


def test_an_unknown_name_is_an_error_before_anything_starts(tmp_path):
    with pytest.raises(ConfigError, match="'wandbb', expected some of tensorboard, wandb"):
        Loopscope.Config(out=tmp_path / "run", trackers=("wandbb",))
    with pytest.raises(ConfigError, match="expected a tuple of names"):
        Loopscope.Config(out=tmp_path / "run", trackers="wandb")
    assert Loopscope.Config(out=tmp_path / "run", trackers=["wandb", "wandb"]).trackers == ("wandb",)


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_a_missing_package_says_what_to_install(tmp_path, monkeypatch, name):
    real = registry.find_spec
    monkeypatch.setattr(registry, "find_spec", lambda asked: None if asked == name else real(asked))
    with pytest.raises(UnsupportedError, match=rf"pip install 'loopscope\[{name}\]'"):
        Loopscope.Config(out=tmp_path / "run", trackers=(name,))


def test_a_folder_named_like_the_package_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "some_tracker").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert registry.find_spec("some_tracker") is not None
    assert not registry._is_installed("some_tracker")


def test_another_package_can_register_one(tmp_path, monkeypatch):
    made = Remembering()
    module = types.ModuleType("their_tracker")
    module.start = lambda begin: made
    monkeypatch.setitem(sys.modules, "their_tracker", module)
    register(monkeypatch, "theirs", "their_tracker")
    assert registry.known_trackers() == ("tensorboard", "theirs", "wandb")
    config = Loopscope.Config(out=tmp_path / "run", trackers=("theirs",))
    with Loopscope(config) as scope:
        scope.open(expected_visits=())
        scope.begin_attempt()
        assert [tracker.name for tracker in scope.trackers.trackers] == ["theirs"]
    assert made.closed


def test_what_is_registered_must_be_a_tracker_and_replaces_none_of_ours(monkeypatch):
    register(monkeypatch, "theirs", "json")
    with pytest.raises(ConfigError, match="registered as json, which has no start"):
        registry.check_trackers(("theirs",))
    register(monkeypatch, "wandb", "json")
    assert callable(registry.backend("wandb").start)
