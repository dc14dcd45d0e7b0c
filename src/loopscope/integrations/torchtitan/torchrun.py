"""``torchrun`` that ends with the ranks' own exit status instead of a traceback about them.

``python -m loopscope.integrations.torchtitan.torchrun`` takes what ``torch.distributed.run`` takes. Exit status:
2 where a rank said that the question was wrong, 128 + N where signal N ended it, else 1.
"""

import sys
from collections.abc import Iterable

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun


def exit_status(codes: Iterable[int]) -> int:
    """The job's exit status from its ranks' exit codes; 2 wins, since the others then only fell with it."""
    return 2 if 2 in codes else 1


def main(arguments: list[str] | None = None) -> int:
    """Run the job; returns the exit status."""
    try:
        torchrun(arguments)
    except ChildFailedError as error:
        return exit_status([failure.exitcode for failure in error.failures.values()])
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main())
