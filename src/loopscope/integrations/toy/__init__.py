"""A plain PyTorch training loop with every leak check on, for CI and for a first look."""

from loopscope.integrations.toy.guard import GuardedCollector
from loopscope.integrations.toy.inject import LEAK_KINDS, LeakingCollector, LeakKind
from loopscope.integrations.toy.loop import ToyResult, ToySettings, build_toy_model, train_toy
from loopscope.integrations.toy.text import ToyCorpus, load_toy_corpus

__all__ = [
    "LEAK_KINDS",
    "GuardedCollector",
    "LeakKind",
    "LeakingCollector",
    "ToyCorpus",
    "ToyResult",
    "ToySettings",
    "build_toy_model",
    "load_toy_corpus",
    "train_toy",
]
