"""A trainer's probe without a trainer: what is asked of the model is up to the test."""

from types import SimpleNamespace

import torch

from loopscope.integrations.torchtitan import probing


def stub_probe(*, steps, **options):
    """A probe of a training of `steps` steps with these settings; `events` takes (step, name, more)."""
    events = []
    collector = SimpleNamespace(
        writes=True, record_event=lambda step, name, severity, **more: events.append((step, name, more))
    )
    settings = SimpleNamespace(**options)
    trainer = SimpleNamespace(
        device="cpu",
        model=None,
        train_context=None,
        session=SimpleNamespace(collector=collector, config=SimpleNamespace(on_error="raise")),
        config=SimpleNamespace(loopscope=settings, training=SimpleNamespace(steps=steps)),
    )
    corpus = SimpleNamespace(input_ids=torch.zeros(2, 4, dtype=torch.int64).numpy())
    return SimpleNamespace(made=probing.TrainerProbe(trainer, corpus, 2), options=settings, events=events)
