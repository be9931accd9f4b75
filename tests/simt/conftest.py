"""The op suite's generator of attention problems (tests/ops/problems.py) serves these tests too."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "ops"))
