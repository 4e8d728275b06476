"""What autograd keeps of a layer's sum over pairs until its backward, with tensors that have no data."""

import sys

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from itnet_kernels import KERNEL_INPUTS, KernelWeights, integral_transform, kernel_input_size

N, BATCH, HEADS, HEAD_DIM, WIDTH, FREQUENCIES = 4096, 32, 12, 64, 128, 64


def saved_bytes(monkeypatch, dtype: torch.dtype, is_causal: bool) -> int:
    """Bytes of all storages that the triton backend saves, but for the weights, which exist anyway."""
    monkeypatch.setattr(sys.modules[integral_transform.__module__], "resolve_backend", lambda *given: "triton")
    storages, kept = {}, []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage.nbytes()
        kept.append(tensor)  # a storage that is freed could lend its address to the next one
        return tensor

    def new(*shape: int, requires_grad: bool = True, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, requires_grad=requires_grad)

    with FakeTensorMode(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        weights = KernelWeights(
            w1=new(WIDTH, kernel_input_size(KERNEL_INPUTS, FREQUENCIES, 1, HEAD_DIM)),
            b1=new(WIDTH),
            w2=new(HEADS, HEAD_DIM**2, WIDTH),
            b2=new(HEADS, HEAD_DIM**2),
            fourier=new(FREQUENCIES, 1, requires_grad=False),
            inputs=KERNEL_INPUTS,
        )
        u = new(BATCH, N, HEADS, HEAD_DIM, dtype=dtype)
        settings = {"measure": new(BATCH, N, requires_grad=False), "is_causal": is_causal}
        out = integral_transform(u, new(N, 1, requires_grad=False), weights, **settings)
        assert out.requires_grad
        own = {tensor.untyped_storage()._cdata for tensor in weights[:5] if tensor is not None}
    return sum(size for number, size in storages.items() if number not in own)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_features_are_kept_once_in_their_dtype(monkeypatch, dtype, is_causal):
    """Beside them: W2 as it is multiplied, and what heads share, less than 2^23 bytes here."""
    features, w2 = BATCH * N * HEADS * HEAD_DIM * dtype.itemsize, HEADS * WIDTH * HEAD_DIM**2 * 4
    saved = saved_bytes(monkeypatch, dtype, is_causal)
    assert features <= saved <= features + w2 + 2**23
