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
"""Encoders: what turns the inputs of a modality into a :class:`Signal`. A new modality is one new file here.

An encoder names the forward arguments it takes (``required``, of which exactly one must be given, and ``optional``),
gives its ``main_input_name`` and ``input_embeddings()``, and is called with those arguments and the Fourier features.
"""

from .graph import ITNetGraphEncoder
from .image import ITNetImageEncoder
from .multimodal import ITNetMultimodalEncoder
from .point_cloud import ITNetPointCloudEncoder
from .raw import ITNetSignalEncoder, signal_measure
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
