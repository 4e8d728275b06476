"""How the three packages hang together: what they import, and what they have to agree on."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

import configuration_itnet
import itnet_kernels

ROOT = Path(__file__).parents[2]

IMPORT_WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # importing it raises ImportError
import torch
import modeling_itnet
from modeling_itnet import ITNetConfig, ITNetModel

config = ITNetConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, kernel_hidden_size=4, image_size=32)
output = ITNetModel(config)(pixel_values=torch.zeros(1, 3, 32, 32))
print(torch.cuda.is_available(), tuple(output.last_hidden_state.shape))
"""


def run_python(code, **environment):
    """The last line that a fresh interpreter prints."""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()[-1]


def imported_by(package, *names):
    """Those of ``names`` that a fresh interpreter has loaded after importing ``package``."""
    code = f"import json, sys, {package}; print(json.dumps([n for n in {names} if n in sys.modules]))"
    return json.loads(run_python(code))


class TestImports:
    def test_without_triton_and_gpu(self):
        assert run_python(IMPORT_WITHOUT_TRITON, CUDA_VISIBLE_DEVICES="") == "False (1, 5, 16)"

    def test_kernels_know_only_tensors(self):
        others = ("transformers", "configuration_itnet", "modeling_itnet")
        assert imported_by("itnet_kernels", *others) == []

    def test_configuration_needs_no_model(self):
        """It takes the names and sizes of the kernel's inputs from the kernels."""
        names = ("modeling_itnet", "itnet_kernels", "transformers")
        assert imported_by("configuration_itnet", *names) == ["itnet_kernels", "transformers"]

    @pytest.mark.parametrize("folder", ["kernels", "configuration", "tests/kernels"])
    def test_folders_are_no_packages(self, folder):
        """A package `kernels` would hide the library of that name, which Transformers imports."""
        assert (ROOT / folder).is_dir()
        assert not (ROOT / folder / "__init__.py").exists()

    def test_public_names_exist(self):
        import modeling_itnet

        for package in (modeling_itnet, configuration_itnet, itnet_kernels):
            assert [name for name in package.__all__ if not hasattr(package, name)] == []


class TestAgreement:
    def test_kernel_input_size(self):
        generator = random.Random(0)
        for _ in range(50):
            groups = [name for name in itnet_kernels.KERNEL_INPUTS if generator.random() < 0.6]
            generator.shuffle(groups)
            heads, size = generator.randint(1, 5), generator.randint(1, 20)
            config = configuration_itnet.ITNetConfig(
                modality="signal",
                position_dim=generator.randint(1, 9),
                hidden_size=heads * size,
                num_attention_heads=heads,
                rank=1,
                num_fourier_features=generator.choice([0, 0, 1, 5, 64]),
                kernel_inputs=groups,
            )
            assert config.kernel_input_size == itnet_kernels.kernel_input_size(
                config.kernel_inputs, config.num_fourier_features, config.position_dim, config.head_dim
            )

    def test_backends(self):
        """Every backend that a configuration may name is one that the operator knows."""
        for backend in itnet_kernels.BACKENDS:
            assert configuration_itnet.ITNetConfig(backend=backend).backend == backend
