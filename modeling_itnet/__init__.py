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
"""ITNet for Transformers. Importing this package registers its classes with the Auto classes."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

from configuration_itnet import ITNetConfig, preset_names

from ._version import __version__
from .domain import Signal
from .heads import ITNetForImageClassification, ITNetForMaskedLM, ITNetForSequenceClassification
from .modeling_itnet import ITNetModel, ITNetPreTrainedModel
from .operator import ITNetFourierFeatures, ITNetOperator
from .optimization import optimizer_param_groups

AutoConfig.register("itnet", ITNetConfig, exist_ok=True)
for auto_class, model_class in {
    AutoModel: ITNetModel,
    AutoModelForImageClassification: ITNetForImageClassification,
    AutoModelForMaskedLM: ITNetForMaskedLM,
    AutoModelForSequenceClassification: ITNetForSequenceClassification,
}.items():
    auto_class.register(ITNetConfig, model_class, exist_ok=True)

__all__ = [
    "ITNetConfig",
    "ITNetForImageClassification",
    "ITNetForMaskedLM",
    "ITNetForSequenceClassification",
    "ITNetFourierFeatures",
    "ITNetModel",
    "ITNetOperator",
    "ITNetPreTrainedModel",
    "Signal",
    "__version__",
    "optimizer_param_groups",
    "preset_names",
]
