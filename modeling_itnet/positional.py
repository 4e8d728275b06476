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
"""Which forward arguments a positional call means."""

import inspect
from functools import wraps

from .encoders import ENCODERS

_INPUTS = {name for encoder in ENCODERS.values() for name in encoder.required + encoder.optional}


def takes_main_input_first(forward):
    """Wraps a forward: the first positional argument is the main input of the model's modality.

    The signature names the inputs of all modalities, and stays as it is for whoever inspects it. Positional arguments
    are `model.main_input_name`, then those of the signature, in its order, that the modality takes: a text model is
    called by ``model(input_ids, attention_mask)``, as any other of Transformers.
    """
    names = [
        parameter.name
        for parameter in inspect.signature(forward).parameters.values()
        if parameter.kind != parameter.VAR_KEYWORD
    ][1:]

    @wraps(forward)
    def wrapper(self, *args, **kwargs):
        if not args or names[0] == self.main_input_name:
            return forward(self, *args, **kwargs)
        encoder = self.base_model.encoder
        taken = [name for name in names if name not in _INPUTS or name in encoder.required + encoder.optional]
        order = [self.main_input_name, *(name for name in taken if name != self.main_input_name)]
        if len(args) > len(order):
            raise TypeError(f"forward takes at most {len(order)} positional arguments, {order}, got {len(args)}")
        return forward(self, **dict(zip(order, args, strict=False)), **kwargs)

    return wrapper
