# SPDX-License-Identifier: Apache-2.0
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
