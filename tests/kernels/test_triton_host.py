"""What decides how the Triton kernels are called, with tensors that only claim to be on a GPU."""

import importlib
import logging

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="the triton package is not installed")

from itnet_kernels.backends import resolve_backend
from itnet_kernels.exact.triton import device as device_module
from itnet_kernels.exact.triton.device import dot_precision
from itnet_kernels.products import float32_product

CUDA = torch.device("cuda")


@pytest.fixture
def matmul_settings():
    """PyTorch's setting of float32 products, put back after the test."""
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    yield settings
    settings.fp32_precision = before


@pytest.mark.parametrize(("setting", "expected"), [("tf32", "tf32"), ("ieee", "tf32x3"), ("none", "tf32x3")])
def test_precision_by_the_new_setting(matmul_settings, setting, expected):
    """``torch.get_float32_matmul_precision`` raises once this setting was used."""
    matmul_settings.fp32_precision = setting
    assert dot_precision(CUDA) == expected
    assert dot_precision(torch.device("cpu")) == "ieee"


@pytest.mark.parametrize(("setting", "expected"), [("highest", "tf32x3"), ("high", "tf32"), ("medium", "tf32")])
def test_precision_by_the_old_setting(matmul_settings, setting, expected):
    torch.set_float32_matmul_precision(setting)
    try:
        assert dot_precision(CUDA) == expected
    finally:
        torch.set_float32_matmul_precision("highest")


class _Operators(TorchDispatchMode):
    """Names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_float32_product_on_a_gpu():
    """One product of half-precision operands; no copy of them in float32."""
    with FakeTensorMode(), _Operators() as operators:
        left, right = (torch.empty(2, *shape, dtype=torch.float16, device=CUDA) for shape in ((512, 64), (64, 16)))
        operators.names.clear()
        product = float32_product(left, right)
    assert product.dtype == torch.float32 and product.shape == (2, 512, 16)
    assert [name for name in operators.names if name.startswith("aten")] == ["aten.bmm.dtype"]


def test_float32_product_elsewhere():
    """Sums beyond the range and the resolution of float16."""
    left, right = (
        torch.full((1, 2, 64), 300.0, dtype=torch.float16),
        torch.full((1, 64, 2), 300.5, dtype=torch.float16),
    )
    assert torch.equal(float32_product(left, right), torch.full((1, 2, 2), 300 * 300.5 * 64))


FUSED = [
    (9, True, True),
    (10, False, False),
    (8, False, True),
    (8, True, False),
    (12, True, False),
    (None, False, False),
]


@pytest.mark.parametrize(("major", "stores_pairs", "expected"), FUSED)
def test_where_the_backward_is_fused(monkeypatch, major, stores_pairs, expected):
    """Hopper always, Blackwell and AMD never, elsewhere unless dL/dP itself is wanted. Half precision, d_h <= 64."""
    monkeypatch.delenv("ITNET_FUSED_BACKWARD", raising=False)
    monkeypatch.setattr(device_module, "device_major", lambda device: major)
    assert device_module.has_fused_backward(64, torch.bfloat16, CUDA, stores_pairs) is expected
    assert device_module.has_fused_backward(32, torch.bfloat16, CUDA, stores_pairs) is (expected and major != 8)
    assert not device_module.has_fused_backward(128, torch.bfloat16, CUDA, stores_pairs)
    assert not device_module.has_fused_backward(64, torch.float32, CUDA, stores_pairs)


@pytest.fixture
def choose(problem):
    """Sizes -> the backend that "auto" takes for them on a GPU."""
    importlib.import_module("itnet_kernels.backends")._log_once.cache_clear()

    def run(dtype: torch.dtype = torch.float16, **sizes: int) -> str:
        weights = problem(**sizes).weights
        with FakeTensorMode():
            u = torch.empty(1, 4, 2, sizes["head_dim"], dtype=dtype, device=CUDA)
        return resolve_backend("auto", u, weights)

    return run


@pytest.mark.parametrize(("head_dim", "width"), [(64, 128), (48, 128), (80, 96), (96, 96), (8, 20)])
def test_auto_on_a_gpu_is_triton(choose, caplog, head_dim, width):
    with caplog.at_level(logging.WARNING):
        assert choose(head_dim=head_dim, width=width) == "triton"
    assert not caplog.records


@pytest.mark.parametrize(
    ("sizes", "advice"),
    [
        ({"head_dim": 160, "width": 32}, "`u` has 160; use more heads"),
        ({"head_dim": 16, "width": 512}, "`weights.w1` has 512; use a smaller width"),
        ({"head_dim": 16, "width": 32, "layers": 3}, "use a 2-layer one"),
        ({"head_dim": 16, "width": 32, "dtype": torch.float64}, "cast the features"),
    ],
    ids=["head size", "width", "layers", "dtype"],
)
def test_a_gpu_without_its_kernels_warns_once(choose, caplog, sizes, advice):
    with caplog.at_level(logging.WARNING):
        assert [choose(**sizes) for _ in range(2)] == ["tiled", "tiled"]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert advice in record.getMessage() and "slower" in record.getMessage()
