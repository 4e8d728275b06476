"""Runs the suite under the CPU capabilities, thread counts and test orders that users have, and prints a table.

    python tests/sweep.py                   # every row; rows that passed for this commit are skipped
    python tests/sweep.py --rows avx2 again # some of them
    python tests/sweep.py -- tests/kernels  # a part of the suite: what follows `--` goes to pytest

Logs and results are in `outputs/sweep/<commit>`, a folder that git ignores. A row that this CPU cannot run is skipped
and says so. Exits with 1 if a row failed.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VECTORS_OF_2013 = {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}


def row(capability: str | None, threads: int, seed: int | None = None, environment: dict[str, str] | None = None):
    """One run: ATEN_CPU_CAPABILITY (None: whatever the CPU has), threads per process, seed of a random order."""
    # Threads that wait sleep: spinning, they would take the cores from each other and from whatever else runs.
    variables = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"} | (environment or {})
    if capability is not None:
        variables["ATEN_CPU_CAPABILITY"] = capability
    return {"capability": capability, "seed": seed, "threads": threads, "variables": variables}


#: Together they have every capability, both libraries held to AVX2, 1 and 2 threads, the fixed order and three random
#: ones, and two runs in a row of the same thing ("fixed", "again").
ROWS = {
    "default": row("default", threads=1, seed=1),
    "avx2": row("avx2", threads=1, seed=2, environment=VECTORS_OF_2013),
    "avx512": row("avx512", threads=1, seed=3),
    "fixed": row(None, threads=2),
    "again": row(None, threads=2),
}


def capabilities() -> tuple[str, ...]:
    """The values of ATEN_CPU_CAPABILITY that this CPU can run, the least first."""
    code = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    own = {name: value for name, value in os.environ.items() if name != "ATEN_CPU_CAPABILITY"}
    result = subprocess.run([sys.executable, "-c", code], env=own, capture_output=True, text=True, check=True)
    known = ("default", "avx2", "avx512")
    found = result.stdout.strip().lower()
    return known[: known.index(found) + 1] if found in known else known[:1]


def run(name: str, arguments: list[str], folder: Path) -> dict:
    """Runs one row in processes of its own; returns what is kept of it."""
    setting = ROWS[name]
    workers = max(1, (os.cpu_count() or 1) // setting["threads"])
    command = [sys.executable, "-m", "pytest", "-n", str(workers), *arguments]
    if setting["seed"] is not None:
        command += ["-p", "randomly", f"--randomly-seed={setting['seed']}"]
    started = time.time()
    with open(folder / f"{name}.log", "w", encoding="utf-8") as log:
        process = subprocess.run(
            command, cwd=ROOT, env=os.environ | setting["variables"], stdout=log, stderr=subprocess.STDOUT
        )
    lines = (folder / f"{name}.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    summary = lines[-1].strip("= ") if lines else "no output"
    outcome = "passed" if process.returncode == 0 else "FAILED"
    return {"outcome": outcome, "summary": summary, "minutes": round((time.time() - started) / 60, 1)}


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--again", action="store_true", help="run rows that passed for this commit once more")
    parser.add_argument("arguments", nargs="*", help="for pytest, after `--`")
    options = parser.parse_args()
    # Changed files belong to no commit, and a part of the suite is not the suite: neither is worth remembering.
    commit = git("rev-parse", "--short=12", "HEAD")
    whole = not options.arguments and not git("status", "--porcelain")
    folder = ROOT / "outputs" / "sweep" / (commit if whole else f"{commit}-part")
    folder.mkdir(parents=True, exist_ok=True)
    available, results = capabilities(), {}
    for name in options.rows:
        kept, capability = folder / f"{name}.json", ROWS[name]["capability"]
        if capability is not None and capability not in available:
            results[name] = {"outcome": "skipped", "summary": f"this CPU has {available[-1]} at most", "minutes": 0}
            continue
        if whole and not options.again and kept.exists():
            earlier = json.loads(kept.read_text(encoding="utf-8"))
            if earlier["outcome"] == "passed":
                results[name] = earlier | {"outcome": "passed earlier"}
                continue
        print(f"{name}: log in {folder / name}.log", flush=True)
        results[name] = run(name, options.arguments, folder)
        kept.write_text(json.dumps(results[name]), encoding="utf-8")
    print(f"\ncommit {commit}{'' if whole else ', changed files or a part of the suite'}")
    for name, result in results.items():
        setting = ROWS[name]
        order = "fixed order" if setting["seed"] is None else f"random order {setting['seed']}"
        settings = f"{setting['threads']} thread(s), {order}"
        print(f"{name:8} {settings:27} {result['outcome']:15} {result['minutes']:5} min  {result['summary']}")
    return 1 if any(result["outcome"] == "FAILED" for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
