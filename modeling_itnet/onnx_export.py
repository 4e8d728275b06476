# Copyright 2026 The ITNet Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Graphs of plain tensor operations, and ONNX files made of them.

The sum over pairs is one opaque operator, which no other runtime knows. Here it is written out, densely: a graph that
holds one hidden unit of every pair at once, n^2 H w numbers per sample. Low-rank models need no such thing.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.export import ExportedProgram

from itnet_kernels import fourier_features
from itnet_kernels.pair_sum import PairInputs, pair_sum

from .modeling_itnet import ITNetPreTrainedModel


def dense_pair_sum(*arguments) -> Tensor:
    """out_i[a] = sum_{k,c} W2[(k, c), a] sum_j h_ij[k] omega_j u_j[c], as ``itnet::pair_sum`` but all at once."""
    inputs = PairInputs(*arguments[:-2])  # then operand dtype and backend
    queries, keys, row = (t.transpose(1, 2) for t in (inputs.queries, inputs.keys, inputs.row))  # [B, H, n, .]
    batch, heads, num_queries, width = row.shape
    num_keys, head_dim = keys.shape[2:]
    hidden = row.unsqueeze(-1)  # [B, H, n_q, w, n_k], as are the next three
    if inputs.w_key is not None:
        hidden = hidden + (keys @ inputs.w_key.T).transpose(2, 3).unsqueeze(2)
    if inputs.w_product is not None:
        virtual = (queries.unsqueeze(3) * inputs.w_product).flatten(2, 3)  # [B, H, n_q w, d_h]
        hidden = hidden + (virtual @ keys.transpose(2, 3)).unflatten(2, (num_queries, width))
    if inputs.has_position_bias:
        hidden = hidden + _position_bias(inputs).to(row.dtype).transpose(2, 3).unsqueeze(1)
    hidden = torch.nn.functional.gelu(hidden)
    if inputs.w_mid is not None:
        mixed = hidden.transpose(3, 4) @ inputs.w_mid.T + inputs.b_mid
        hidden = torch.nn.functional.gelu(mixed).transpose(3, 4)
    measure = keys.new_full((1, num_keys), 1 / num_keys) if inputs.measure is None else inputs.measure
    measure = measure[:, None].to(row.dtype)  # [B or 1, 1 or n_q, n_k]
    if inputs.is_causal:  # query i sees keys j <= i + n_k - n_q
        measure = measure.expand(-1, num_queries, -1).tril(num_keys - num_queries)
    weighted = (hidden * measure[:, None, :, None]).expand(batch, heads, num_queries, width, num_keys)
    moments = (weighted.flatten(2, 3) @ keys).view(batch, heads, num_queries, width * head_dim)
    return (moments @ inputs.w2).transpose(1, 2).contiguous()


def _position_bias(inputs: PairInputs) -> Tensor:
    """P_ij[k]: [B or 1, n_q, n_k, w]."""
    difference = inputs.query_positions.unsqueeze(2) - inputs.key_positions.unsqueeze(1)  # [B or 1, n_q, n_k, s]
    bias = 0
    if inputs.w_y is not None:
        bias = (inputs.key_features @ inputs.w_y.T).unsqueeze(1)
    if inputs.w_relative is not None:
        features = fourier_features(difference, inputs.frequencies).to(inputs.w_relative.dtype)
        bias = bias + features @ inputs.w_relative.T
    if inputs.w_distance is not None:
        distance = difference.square().sum(-1, keepdim=True).sqrt().to(inputs.w_distance.dtype)
        bias = bias + distance @ inputs.w_distance.T
    return bias


def export_graph(
    model: ITNetPreTrainedModel, inputs: Mapping[str, Tensor], dynamic_batch: bool = True
) -> ExportedProgram:
    """
    A graph of plain tensor operations.

    Args:
        model: Any ITNet model; it is exported as it runs in evaluation.
        inputs: Forward arguments. With a dynamic batch, two samples at least.
        dynamic_batch (`bool`, *optional*, defaults to `True`):
            The graph takes any number of samples. Graph models have a fixed number.
    """
    shared = [name for name, value in inputs.items() if name.endswith("positions") and value.dim() == 2]
    dynamic = {
        name: {0: torch.export.Dim.DYNAMIC} if dynamic_batch and name not in shared else None for name in inputs
    }
    program = torch.export.export(model.eval(), (), dict(inputs), dynamic_shapes=dynamic, strict=False)
    return program.run_decompositions({pair_sum._opoverload: dense_pair_sum})


def export_onnx(
    model: ITNetPreTrainedModel, inputs: Mapping[str, Tensor], path: str | Path, dynamic_batch: bool = True
) -> Path:
    """Writes an ONNX file; arguments as in :func:`export_graph`. Needs onnx and onnxscript.

    The inputs keep their names, and the outputs are those of the model in their order.
    """
    try:
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError('Writing ONNX needs onnx and onnxscript: pip install "itnet[onnx]"') from error
    program = torch.onnx.export(export_graph(model, inputs, dynamic_batch), dynamo=True, verbose=False)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    program.save(str(path))
    return Path(path)


__all__ = ["export_graph", "export_onnx"]
