"""The package as a kernel repository of the Hub, loaded the way Transformers would."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import itnet_kernels

kernels = pytest.importorskip("kernels", reason="the kernels package is not installed")

SCRIPT = Path(__file__).resolve().parents[2] / "kernels" / "hub_repository.py"


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernel")
    subprocess.run([sys.executable, SCRIPT, folder], check=True)
    return folder


def test_layout(repository):
    build = repository / "build" / "torch-universal"
    metadata = json.loads((build / "metadata.json").read_text(encoding="utf-8"))
    assert metadata["name"] == "itnet-kernels" and metadata["version"] == 1
    sources = repository / "torch-ext" / "itnet_kernels"
    names = {path.relative_to(sources).as_posix() for path in sources.rglob("*.py")}
    assert names == {path.relative_to(build).as_posix() for path in build.rglob("*.py")} and "exact/tiled.py" in names
    parsed = kernels._rust.Build.open(repository)  # kernel-builder's own parser
    assert len(parsed.general.backends) == 4


def test_loads_and_computes_the_same(repository, problem):
    loaded = kernels.get_local_kernel(repository)
    assert loaded.__name__ != "itnet_kernels"
    problem_ = problem(n=9).to(torch.float32)
    weights = loaded.KernelWeights(*problem_.weights)
    results = []
    for module, its_weights in ((loaded, weights), (itnet_kernels, problem_.weights)):
        u = problem_.u.detach().clone().requires_grad_()
        out = module.integral_transform(u, problem_.positions, its_weights, measure=problem_.measure)
        out.square().sum().backward()
        results.append((out.detach(), u.grad))
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_has_operators_of_its_own(repository):
    loaded = kernels.get_local_kernel(repository)
    own, other = (
        sys.modules[f"{package.__name__}.integral_transform"].pair_sum._qualname for package in (itnet_kernels, loaded)
    )
    assert own == "itnet::pair_sum" != other
