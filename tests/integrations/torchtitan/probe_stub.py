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
    settings = SimpleNamespace(probe_batch_size=2, **options)
    session = SimpleNamespace(collector=collector, config=SimpleNamespace(on_error="raise"))
    corpus = SimpleNamespace(input_ids=torch.zeros(2, 4, dtype=torch.int64).numpy())
    made = probing.TrainerProbe(session, None, corpus, settings, device="cpu", last_step=steps, context=None)
    return SimpleNamespace(made=made, options=settings, events=events)
