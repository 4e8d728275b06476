"""CONTRIBUTING.md says how many functions and files a batch passes through: as many as tests/walk.py counts."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_walk_of_a_batch():
    command = [sys.executable, str(ROOT / "tests" / "walk.py"), str(ROOT)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    frames, files = map(int, re.search(r"^(\d+) frames in (\d+) files$", done.stdout, re.MULTILINE).groups())
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert f"{frames} functions in {files} files" in " ".join(page.split())
    assert frames <= 14 and files <= 9  # before the code had rooms, it counted 28 in 15
