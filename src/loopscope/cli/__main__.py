"""`python -m loopscope.cli` is the command `loopscope`."""

import sys

from loopscope.cli import main

sys.exit(main())
