"""Two processes train one model: the steps are those of one process with twice the batch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["num_hidden_layers=1", "hidden_size=16", "num_attention_heads=2", "intermediate_size=16", "rank=2"]
SMALL += ["kernel_hidden_size=4", "num_fourier_features=4", "factor_hidden_size=4", "local_neighbors=2"]


def options(data: Path, batch: int) -> list[str]:
    words = ["configuration/recipes/modelnet10-cpu.yaml", "--dataset", str(data), "--max_steps", "2"]
    words += ["--per_device_train_batch_size", str(batch), "--per_device_eval_batch_size", "4"]
    return [*words, "--augment", "false", "--num_points", "64", "--config_overrides", *SMALL]


@pytest.mark.slow
def test_two_processes(tiny_data, run_script, tmp_path, monkeypatch):
    output, data = tmp_path / "two", tiny_data["run_point_cloud"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["examples/run_point_cloud.py", *options(data, batch=2)]
    command += ["--output_dir", str(output), "--use_cpu", "true", "--disable_tqdm", "true"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    two = json.loads((output / "results.json").read_text(encoding="utf-8"))

    monkeypatch.chdir(ROOT)
    one = run_script("run_point_cloud", *options(data, batch=4))
    assert two["steps"] == one["steps"] == 2
    assert two["train_loss"] == pytest.approx(one["train_loss"], rel=1e-3)
    assert two["metrics"]["loss"] == pytest.approx(one["metrics"]["loss"], rel=1e-3)
