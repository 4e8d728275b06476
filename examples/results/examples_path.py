"""Importing this puts examples/ on the import path: scripts of this folder use common/ and the run_*.py in it."""

import sys
from pathlib import Path

EXAMPLES = str(Path(__file__).resolve().parents[1])
if EXAMPLES not in sys.path:
    sys.path.append(EXAMPLES)
