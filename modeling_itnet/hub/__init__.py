# SPDX-License-Identifier: Apache-2.0
"""Everything around sharing a checkpoint: folders with code, and model cards."""

from .card import model_card, preset_cards, result_task
from .create import create_checkpoint, make_tokenizer
from .export import export_to_hub_folder, push_with_code

__all__ = [
    "create_checkpoint",
    "export_to_hub_folder",
    "make_tokenizer",
    "model_card",
    "preset_cards",
    "push_with_code",
    "result_task",
]
