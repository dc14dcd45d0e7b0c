"""Settings are refused with the fix in the message, and stored so that a reader judges as the training did."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopscope.alerts import RULES, AlertConfig, AlertOverrides, AlertSettings, rules_at, settings_for
from loopscope.errors import ConfigError

SECRETS = ("hunter2", "T0SECRET", "tok3n", "s3cretuser")
URL = "https://s3cretuser:hunter2@hooks.example.org:8443/services/T0SECRET?key=tok3n"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"off": ("max_vio",)}, "Did you mean 'maxvio'"),
        ({"off": ("nothing",)}, "expected rules out of closure, nonfinite"),
        ({"off": "maxvio"}, "expected names of rules"),
        ({"sustain": 2.0}, "expected an integer >= 1"),
        ({"growth": True}, "expected a number above 0"),
        ({"growth": "1"}, "expected a number above 0"),
    ],
)
def test_wrong_bounds_say_what_was_expected(change, words):
    with pytest.raises(ConfigError, match=words):
        AlertSettings(**change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rules": {"sustain": 3}}, "expected AlertSettings"),
        ({"webhook": "ftp://a.example/x"}, "expected http"),
        ({"webhook": "hooks.example/x"}, "expected http"),
        ({"webhook": "https:///x"}, "expected http"),
        ({"webhook": "https://a.example/x\nHost: b"}, "expected http"),
        ({"webhook": "env:"}, "env:NAME"),
        ({"webhook": 3}, "expected text"),
        ({"command": ("say 'x",)}, "balanced quotes"),
        ({"command": ("", "x")}, "expected a program"),
        ({"command": 3}, "a program and its arguments"),
        ({"min_severity": "info"}, "'warn' or 'critical'"),
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"gather_s": float("nan")}, "gather_s is nan"),
    ],
)
def test_wrong_deliveries_say_what_was_expected(change, words):
    with pytest.raises(ConfigError, match=words):
        AlertConfig(**change)


def test_a_wrong_address_is_not_repeated():
    for wrong in (URL.replace("https", "gopher"), URL + "\n", URL.replace("8443", "notaport")):
        with pytest.raises(ConfigError) as caught:
            AlertConfig(webhook=wrong)
        assert not any(secret in str(caught.value) for secret in SECRETS)


def test_what_is_stored_and_shown_has_no_secret():
    config = AlertConfig(webhook=URL, command=("notify", "--token", "tok3n"))
    plain = config.as_plain()
    assert plain["webhook"] == "https://hooks.example.org:8443/***"
    assert plain["command"] == ["notify", "***"]
    assert not any(secret in json.dumps(plain) for secret in SECRETS)
    assert "webhook" not in repr(config)
    assert AlertConfig(webhook="env:HOOK").as_plain()["webhook"] == "env:HOOK"


def test_one_text_is_taken_apart_as_a_shell_would():
    assert AlertConfig(command=("notify --level 3 'a b'",)).command == ("notify", "--level", "3", "a b")
    assert AlertConfig(command="notify x").command == ("notify", "x")
    assert AlertConfig(command=["notify", "a b"]).command == ("notify", "a b")


def test_what_is_not_there_is_refused_before_training(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match="not a program"):
        AlertConfig(command=("no-such-program-anywhere",)).sinks()
    (tmp_path / "plain").write_text("no program")
    with pytest.raises(ConfigError, match=r"chmod \+x"):
        AlertConfig(command=(str(tmp_path / "plain"),)).sinks()
    monkeypatch.delenv("HOOK_OF_TEST", raising=False)
    with pytest.raises(ConfigError, match="HOOK_OF_TEST is not set"):
        AlertConfig(webhook="env:HOOK_OF_TEST").sinks()
    monkeypatch.setenv("HOOK_OF_TEST", "nonsense tok3n")
    with pytest.raises(ConfigError) as caught:
        AlertConfig(webhook="env:HOOK_OF_TEST").sinks()
    assert "tok3n" not in str(caught.value)


@given(
    st.builds(
        AlertSettings,
        warmup_steps=st.integers(0, 10**6),
        sustain=st.integers(1, 100),
        clear_at=st.floats(0.01, 1),
        growth=st.floats(0.01, 1e6),
        off=st.lists(st.sampled_from(list(RULES)), unique=True, max_size=4).map(tuple),
    )
)
def test_a_reader_judges_by_what_the_run_stored(settings):
    stored = json.loads(json.dumps({"loopscope": {"alerts": AlertConfig(rules=settings).as_plain()}}))
    assert settings_for(stored) == settings
    assert settings_for(stored, AlertOverrides(sustain=3)) == dataclasses.replace(settings, sustain=3)
    assert settings_for(stored, AlertOverrides()) == settings
    assert settings_for(stored, AlertSettings()) == AlertSettings()


@pytest.mark.parametrize(
    "alerts",
    [
        None, [], "x", {}, {"rules": 3}, {"rules": {"sustain": -1, "off": ["unknown"], "growth": "a", "new": 1}},
        {"rules": {"sustain": 1e300, "warmup_steps": None, "off": [[]]}},
    ],
)  # fmt: skip
def test_a_run_of_another_version_or_of_anybody_is_judged_by_the_defaults(alerts):
    assert settings_for({"loopscope": {"alerts": alerts}}) == AlertSettings()
    assert settings_for({}) == AlertSettings()
    assert settings_for({"loopscope": "x"}) == AlertSettings()


def test_wrong_overrides_are_refused_when_they_are_made():
    with pytest.raises(ConfigError, match="sustain"):
        AlertOverrides(sustain=0)


def test_a_rules_words_have_the_numbers_in_force():
    rules = rules_at(AlertSettings(load_entropy=0.7, sustain=5, dead_expected=50))
    assert "load_entropy_ratio < 0.7 (critical: 0.5)" in rules["load_entropy"].bound
    assert "over 5 traces" in rules["dead_expert"].bound
    assert "e^-50" in rules["dead_expert"].why
    assert not any("{" in rule.bound + rule.why for rule in rules.values())
