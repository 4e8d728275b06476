# SPDX-License-Identifier: Apache-2.0
"""Encoders: what turns the inputs of a modality into a :class:`Signal`. A new modality is one new file here.

An encoder names the forward arguments it takes (``required``, of which exactly one must be given, and ``optional``),
gives its ``main_input_name`` and ``input_embeddings()``, and is called with those arguments and the Fourier features.
"""

from .graph import ITNetGraphEncoder
from .image import ITNetImageEncoder
from .multimodal import ITNetMultimodalEncoder
from .point_cloud import ITNetPointCloudEncoder
from .signal import ITNetSignalEncoder, signal_measure
from .text import ITNetTextEncoder

ENCODERS = {
    "image": ITNetImageEncoder,
    "text": ITNetTextEncoder,
    "multimodal": ITNetMultimodalEncoder,
    "point_cloud": ITNetPointCloudEncoder,
    "graph": ITNetGraphEncoder,
    "signal": ITNetSignalEncoder,
}

__all__ = [
    "ENCODERS",
    "ITNetGraphEncoder",
    "ITNetImageEncoder",
    "ITNetMultimodalEncoder",
    "ITNetPointCloudEncoder",
    "ITNetSignalEncoder",
    "ITNetTextEncoder",
    "signal_measure",
]
