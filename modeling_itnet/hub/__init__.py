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
"""Everything around sharing a checkpoint: folders with code, and model cards."""

from .card import model_card, preset_cards, result_task
from .create import create_checkpoint, find_task, make_tokenizer, task_classes
from .export import auto_map, export_to_hub_folder, push_with_code, write_code

__all__ = [
    "auto_map",
    "create_checkpoint",
    "export_to_hub_folder",
    "find_task",
    "make_tokenizer",
    "model_card",
    "preset_cards",
    "push_with_code",
    "result_task",
    "task_classes",
    "write_code",
]
