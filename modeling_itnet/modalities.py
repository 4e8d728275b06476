# SPDX-License-Identifier: Apache-2.0
"""Finds the classes that the table of modalities names."""

from collections.abc import Iterator
from importlib import import_module

from torch import nn

from configuration_itnet import MODALITIES, Head, ITNetConfig, Modality, find_modality


def load(reference: str):
    """Returns what a reference of the table names: "module:name", or ".module:name" in this package."""
    module, name = reference.split(":")
    return getattr(import_module(module, __package__), name)


def find_encoder(config: ITNetConfig) -> type[nn.Module]:
    """Returns the encoder of a configuration's modality. An exported model imports the one that it has instead."""
    return load(find_modality(config.modality).encoder)


def find_heads() -> Iterator[tuple[type, Head, Modality]]:
    """Yields all classes of models with a head, with what the table says of them."""
    for row in MODALITIES.values():
        for head in row.heads:
            yield load(head.model), head, row


def find_head(model_class: type) -> Head | None:
    """Returns what the table says of a class of models; None for the bare model and for unknown classes."""
    return next((head for cls, head, _ in find_heads() if cls is model_class), None)
