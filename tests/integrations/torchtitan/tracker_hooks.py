"""What happens to W&B in a training of the driver, by name under `wandb` in the scenario."""

import os


def before(scenario):
    """Before torchtitan starts W&B: the scenario's environment, which W&B reads once per process."""
    import wandb

    wandb.teardown()
    os.environ.update(scenario["env"])


def install(trainer, scenario):
    """W&B takes some calls and then no more, from torchtitan and from loopscope alike."""
    import wandb

    if wandb.run is None:
        return
    calls, real = [], wandb.run.log

    def dying(*args, **kwargs):
        calls.append(1)
        if len(calls) > scenario["calls"]:
            raise BrokenPipeError("the service is gone")
        return real(*args, **kwargs)

    wandb.run.log = wandb.log = dying
