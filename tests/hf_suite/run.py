"""Runs Transformers' common model tests, from a clone of its repository, on our classes.

git clone <the repository huggingface/transformers>
python tests/hf_suite/run.py transformers [--revision v5.22.2] [pytest options]

Needs `pip install parameterized`. The clone's tests and suite.py go into a temporary folder; nothing goes to
either repository.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("clone", type=Path, help="clone of huggingface/transformers, with or without a work tree")
    parser.add_argument("--revision", default="HEAD", help="whose tests to run")
    arguments, options = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        archive = [
            "git",
            "-C",
            str(arguments.clone),
            "archive",
            arguments.revision,
            "tests",
            "utils",
            "src/transformers",
        ]
        sources = subprocess.run(archive, check=True, capture_output=True).stdout
        subprocess.run(["tar", "x", "--exclude=tests/models/*/*", "-C", folder], input=sources, check=True)
        # The tests look for src/transformers beside them, and import the installed package.
        shutil.copy(HERE / "suite.py", Path(folder) / "tests" / "test_itnet.py")
        (Path(folder) / "pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider\n", encoding="utf-8")
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": _path(folder)}
        command = [sys.executable, "-m", "pytest", "tests/test_itnet.py", "-q", "-rfEs", *options]
        return subprocess.run(command, cwd=folder, env=environment).returncode


def _path(folder: str) -> str:
    """Where Transformers' conftest.py would look for modules too."""
    return os.pathsep.join([str(Path(folder) / "utils"), *filter(None, [os.environ.get("PYTHONPATH")])])


if __name__ == "__main__":
    sys.exit(main())
