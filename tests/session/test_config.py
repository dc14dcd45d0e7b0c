from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from loopscope.alerts import AlertConfig, AlertSettings
from loopscope.errors import ConfigError
from loopscope.session.config import LoopscopeConfig


def test_out_has_no_default():
    with pytest.raises(TypeError, match="out"):
        LoopscopeConfig()


def test_defaults_and_plain_form(tmp_path):
    config = LoopscopeConfig(out=tmp_path / "run")
    assert (config.trace_every, config.probe_every, config.on_error) == (10, 500, "record")
    assert config.name == "run"
    assert LoopscopeConfig(out=tmp_path, run_name="mine").name == "mine"
    assert config.as_plain()["out"] == str(tmp_path / "run")


def test_text_becomes_a_path_and_nothing_can_be_changed(tmp_path):
    config = LoopscopeConfig(out=str(tmp_path))
    assert config.out == Path(tmp_path)
    with pytest.raises(FrozenInstanceError):
        config.trace_every = 3


@pytest.mark.parametrize("name", ["trace_every", "probe_every"])
@pytest.mark.parametrize("value", [-1, 2.5, True])
def test_wrong_intervals_name_the_field(tmp_path, name, value):
    with pytest.raises(ConfigError, match=f"{name} is {value!r}"):
        LoopscopeConfig(out=tmp_path, **{name: value})


def test_empty_out(tmp_path):
    with pytest.raises(ConfigError, match="out is"):
        LoopscopeConfig(out="")


def test_unknown_on_error(tmp_path):
    with pytest.raises(ConfigError, match="on_error is 'ignore'"):
        LoopscopeConfig(out=tmp_path, on_error="ignore")


def test_alerts_are_a_configuration_of_their_own_and_stored_without_secrets(tmp_path):
    with pytest.raises(ConfigError, match="alerts is a tuple"):
        LoopscopeConfig(out=tmp_path, alerts=("loss > 3",))
    alerts = AlertConfig(rules=AlertSettings(sustain=7, off=("z",)), webhook="https://a.example/secret")
    plain = LoopscopeConfig(out=tmp_path, alerts=alerts).as_plain()
    assert plain["alerts"]["rules"]["sustain"] == 7
    assert plain["alerts"]["rules"]["off"] == ["z"]
    assert "secret" not in str(plain)
    assert "secret" not in repr(LoopscopeConfig(out=tmp_path, alerts=alerts))
