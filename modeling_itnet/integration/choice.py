# SPDX-License-Identifier: Apache-2.0
"""Chooses how to integrate."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor
from transformers.utils import logging

from configuration_itnet import ITNetConfig
from itnet_kernels.transforms import is_batched

logger = logging.get_logger(__name__)

# A mode that holds instead of the configuration's, in the current thread or task.
_MODE: ContextVar[str | None] = ContextVar("integration_mode", default=None)


@contextmanager
def integrating(mode: str) -> Iterator[None]:
    """Makes all models integrate in the given mode within the context, whatever their configurations say."""
    token = _MODE.set(mode)
    try:
        yield
    finally:
        _MODE.reset(token)


def requested_mode(config: ITNetConfig) -> str:
    """Returns the mode that holds here: the configuration's, unless this is inside of :func:`integrating`."""
    return config.integration_mode if torch.compiler.is_compiling() else _MODE.get() or config.integration_mode


#: Most positions that "auto" integrates exactly where ``exact_max_positions`` is None: the paper's number. On a GPU,
#: Monte Carlo integration is predicted to be as fast from 140 to 240 positions on (docs/decisions.md).
EXACT_POSITIONS = 512


def exact_limit(config: ITNetConfig) -> int:
    """Returns the most real positions that "auto" integrates exactly."""
    return EXACT_POSITIONS if config.exact_max_positions is None else config.exact_max_positions


def integration_mode(config: ITNetConfig, count: int) -> str:
    """Returns the mode of a signal of ``count`` real positions, which is never "auto".

    The way in which a position of a causal model is integrated must not change with what comes later: there "auto"
    goes by ``max_position_embeddings``, whatever the length. When "auto" approximates, that is logged once.
    """
    mode = requested_mode(config)
    if mode != "auto":
        return mode
    count = config.max_position_embeddings if config.is_causal else count
    limit = exact_limit(config)
    if count <= limit:
        return "exact"
    mode = config.integration_modes[1]
    if not torch.compiler.is_compiling():
        logger.warning_once(
            f'`integration_mode` ("auto") uses "{mode}" above `exact_max_positions` ({limit}); '
            'set `integration_mode="exact"` for exact integration at every length'
        )
    return mode


def integration_plan(config: ITNetConfig, measure: Tensor, is_padded: bool) -> list[tuple[str, Tensor | None]]:
    """Returns modes and who is integrated in them: the numbers [b] of samples of measure [B, n], or None for all.

    A sample is integrated by its own number of real positions, those of positive measure, so that neither padding nor
    the other samples of a batch change a result. Where values cannot be looked at, as in a compiled graph, "auto"
    needs a batch that leaves no choice: ``n`` up to ``exact_max_positions``, or no padding.
    """
    length = measure.shape[1]
    longest, limit = integration_mode(config, length), exact_limit(config)
    if not is_padded or longest == integration_mode(config, 0):
        return [(longest, None)]
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or is_batched(measure):
        raise ValueError(
            f"`integration_mode` ('auto') chooses for every sample by its number of real positions, which a compiled "
            f"or exported graph and vmap cannot look at: {length} positions with padding are above "
            f"`exact_max_positions` ({limit}). Name a mode: "
            f"`config.integration_mode = 'exact'` or {longest!r}"
        )
    is_long = (measure > 0).sum(1) > limit
    if is_long.all() or not is_long.any():
        return [(longest if is_long.any() else "exact", None)]
    return [("exact", (~is_long).nonzero().flatten()), (longest, is_long.nonzero().flatten())]
