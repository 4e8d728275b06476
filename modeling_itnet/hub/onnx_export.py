# SPDX-License-Identifier: Apache-2.0
"""Exports graphs of plain tensor operations, and ONNX files made of them.

The sum over pairs is one opaque operator, which no other runtime knows. Here it is written out, densely: a graph that
holds one hidden unit of every pair at once, n^2 H w numbers per sample; of near and far models, those of the pairs in
the blocks of windows. Low-rank models need no such thing. Balls around points are found by values, which a graph has
not: there all pairs are computed, and those that are not near count for nothing.
"""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from itnet_kernels.exact.pair_inputs import PairInputs
from itnet_kernels.exact.plain_pair_sum import plain_pair_sum, plain_tile
from itnet_kernels.integral_transform import pair_sum

from ..generation.step import DecodingStep
from ..heads.causal_lm import ITNetForCausalLM
from ..pretrained import ITNetPreTrainedModel


def export_graph(
    model: ITNetPreTrainedModel, inputs: Mapping[str, Tensor], dynamic_batch: bool = True
) -> ExportedProgram:
    """
    Returns a graph of plain tensor operations.

    Args:
        model: Any ITNet model; it is exported as it runs in evaluation.
        inputs: Forward arguments. With a dynamic batch, two samples at least.
        dynamic_batch: The graph takes any number of samples. Graph models have a fixed number.
    """
    dynamic = _dynamic_shapes(inputs, Dim.DYNAMIC if dynamic_batch else None)
    return _plain_graph(model.eval(), (), dict(inputs), dynamic)


def export_onnx(
    model: ITNetPreTrainedModel, inputs: Mapping[str, Tensor], path: str | Path, dynamic_batch: bool = True
) -> Path:
    """Writes an ONNX file; arguments as in :func:`export_graph`. Needs onnx and onnxscript.

    Inputs and outputs have the names that they have in the model, such as ``pixel_values`` and ``logits``; the axis of
    samples is called ``batch`` if it is dynamic.
    """
    with _onnx_file(path) as write:
        graph = export_graph(model, inputs, dynamic_batch)
        axes = _dynamic_shapes(inputs, "batch" if dynamic_batch else None)
        write(graph, dynamic_shapes=axes, output_names=_output_names(graph))
    return Path(path)


def export_decoding_step(
    model: ITNetForCausalLM, capacity: int | None = None, dynamic_batch: bool = True
) -> ExportedProgram:
    """
    Returns a graph of plain tensor operations for one step of decoding, with the arguments and results of
    :class:`DecodingStep`. It starts from `DecodingStep(model, capacity).initial_state(batch)`.

    Args:
        model: A causal language model, in any mode.
        capacity: Tokens that an exact or Monte Carlo model sees; by default `max_position_embeddings`.
        dynamic_batch: The graph takes any number of texts; otherwise one.
    """
    step, batch = DecodingStep(model, capacity), 2 if dynamic_batch else 1
    state = step.initial_state(batch)
    token = torch.zeros(batch, 1, dtype=torch.long, device=state[0].device)
    axis = {0: Dim.DYNAMIC} if dynamic_batch else None
    with torch.no_grad():
        return _plain_graph(step, (token, token[:, 0].clone(), *state), {}, (axis, axis, (axis,) * len(state)))


def export_decoding_step_onnx(
    model: ITNetForCausalLM, path: str | Path, capacity: int | None = None, dynamic_batch: bool = True
) -> Path:
    """Writes the graph of :func:`export_decoding_step` as an ONNX file. Needs onnx and onnxscript.

    Inputs are ``input_ids``, ``position`` and the state, by the names that `DecodingStep.state_names` gives; outputs
    ``logits`` and the state after the step, with ``new_`` before its names.
    """
    names, axis = DecodingStep(model, capacity).state_names, {0: "batch"} if dynamic_batch else None
    with _onnx_file(path) as write:
        write(
            export_decoding_step(model, capacity, dynamic_batch),
            input_names=["input_ids", "position", *names],
            output_names=["logits", *(f"new_{name}" for name in names)],
            dynamic_shapes=(axis, axis, (axis,) * len(names)),
        )
    return Path(path)


def _plain_graph(module: nn.Module, args: tuple, kwargs: dict, dynamic_shapes) -> ExportedProgram:
    program = torch.export.export(module, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
    return program.run_decompositions({pair_sum._opoverload: _dense_pair_sum})


def _dense_pair_sum(*arguments) -> Tensor:
    """Computes ``itnet::pair_sum`` with all pairs at once, or all blocks."""
    inputs = PairInputs(*arguments)
    if inputs.block_pairs:
        return plain_pair_sum(inputs)
    return plain_tile(inputs, last_visible=inputs.keys.shape[1] - inputs.queries.shape[1])


def _dense_cummax(tensor: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Computes ``aten.cummax`` by n^2 comparisons."""
    rows = tensor.movedim(dim, -1)
    visible = torch.ones(rows.shape[-1], rows.shape[-1], dtype=torch.bool, device=rows.device).tril()
    values, indices = rows.unsqueeze(-2).where(visible, -torch.inf).max(-1)
    return values.movedim(-1, dim), indices.movedim(-1, dim)


def _dense_stable_sort(
    tensor: Tensor, *, stable: bool | None = True, dim: int = -1, descending: bool = False
) -> tuple[Tensor, Tensor]:
    """Computes ``aten.sort.stable`` by n^2 comparisons: the place of a value is the number of those before it."""
    rows = tensor.movedim(dim, -1)
    own, other = rows.unsqueeze(-1), rows.unsqueeze(-2)
    numbers = torch.arange(rows.shape[-1], device=rows.device)
    is_before = (other > own if descending else other < own) | ((other == own) & (numbers < numbers.unsqueeze(-1)))
    is_here = is_before.sum(-1).unsqueeze(-2) == numbers.unsqueeze(-1)  # [..., place, value]
    indices = (is_here * numbers).sum(-1)
    return rows.gather(-1, indices).movedim(-1, dim), indices.movedim(-1, dim)


def _whole_split(tensor: Tensor, size: int, dim: int = 0) -> tuple[Tensor, ...]:
    """Takes a tensor that fits into one part as it is; its tile size is a symbol, which ONNX cannot split by."""
    if not isinstance(size, int) and tensor.shape[dim] <= size:
        return (tensor.clone(),)
    return NotImplemented


#: A kernel that decays needs the first, windows that count real tokens the next two, and anchors the last.
_UNKNOWN_TO_ONNX = {
    torch.ops.aten.cummax.default: _dense_cummax,
    torch.ops.aten.sort.stable: _dense_stable_sort,
    torch.ops.aten.argsort.stable: lambda *args, **kwargs: _dense_stable_sort(*args, **kwargs)[1],
    torch.ops.aten.split.Tensor: _whole_split,
}


def _dynamic_shapes(inputs: Mapping[str, Tensor], batch) -> dict:
    """Returns what torch.export is told of every input: the axis of samples, unless all samples share it as [n, s]."""
    shared = {name for name, value in inputs.items() if name.endswith("positions") and value.dim() == 2}
    return {name: None if name in shared or batch is None else {0: batch} for name in inputs}


def _output_names(graph: ExportedProgram) -> list[str]:
    """Returns the fields of the model's output, in its order. Those that hold several tensors are numbered."""
    outputs = graph.call_spec.out_spec
    names = []
    for name, part in zip(outputs.context, outputs.children(), strict=True):
        names += [name] if part.is_leaf() else [f"{name}.{index}" for index in range(part.num_leaves)]
    return names


@contextmanager
def _onnx_file(path: str | Path) -> Iterator[Callable[..., None]]:
    """Gives a function that writes a graph to a file, with the names and axes that torch.onnx.export takes.

    Keeps to itself what the exporters say about their own insides: optional packages, folding, deprecations.
    """
    try:
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError("Writing ONNX needs onnx and onnxscript: pip install onnx onnxscript") from error
    Path(path).parent.mkdir(parents=True, exist_ok=True)

    def write(graph: ExportedProgram, **names) -> None:
        torch.onnx.export(graph.run_decompositions(_UNKNOWN_TO_ONNX), f=path, dynamo=True, verbose=False, **names)

    levels = {logger: logger.level for logger in map(logging.getLogger, ("torch.onnx", "onnxscript", "onnx_ir"))}
    try:
        for logger in levels:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.filterwarnings("ignore", message="# The axis name: batch")  # every input has this axis
            yield write
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
