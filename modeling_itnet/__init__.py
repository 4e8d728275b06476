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

from configuration_itnet import ITNetConfig, preset_names

from ._version import __version__
from .auto import register_auto_classes
from .diagnosis import KernelDiagnosis, diagnose_kernels
from .domain import Signal
from .heads import ITNetForImageClassification, ITNetForMaskedLM, ITNetForSequenceClassification
from .heads_geometry import ITNetForGraphClassification, ITNetForPointCloudClassification
from .heads_multimodal import (
    ITNetForImagesAndTextClassification,
    ITNetForVisualQuestionAnswering,
    vqa_accuracy,
    vqa_soft_targets,
)
from .heads_signal import ITNetForSignalRegression
from .heads_text import ITNetForQuestionAnswering, ITNetForTokenClassification
from .hub import export_to_hub_folder
from .low_rank_fit import LowRankReport
from .modeling_itnet import ITNetModel, ITNetPreTrainedModel
from .multimodal_checkpoints import from_image_and_text_checkpoints
from .operator import ITNetFourierFeatures, ITNetOperator
from .optimization import optimizer_param_groups
from .pipelines import register_pipelines
from .processing import ITNetGraphProcessor, ITNetImageProcessor, ITNetPointCloudProcessor, ITNetProcessor
from .spectrum import KernelSpectrum, kernel_spectrum

register_auto_classes()
register_pipelines()

__all__ = [
    "ITNetConfig",
    "ITNetForGraphClassification",
    "ITNetForImageClassification",
    "ITNetForImagesAndTextClassification",
    "ITNetForMaskedLM",
    "ITNetForPointCloudClassification",
    "ITNetForQuestionAnswering",
    "ITNetForSequenceClassification",
    "ITNetForSignalRegression",
    "ITNetForTokenClassification",
    "ITNetForVisualQuestionAnswering",
    "ITNetFourierFeatures",
    "ITNetGraphProcessor",
    "ITNetImageProcessor",
    "ITNetModel",
    "ITNetOperator",
    "ITNetPointCloudProcessor",
    "ITNetPreTrainedModel",
    "ITNetProcessor",
    "KernelDiagnosis",
    "KernelSpectrum",
    "LowRankReport",
    "Signal",
    "__version__",
    "diagnose_kernels",
    "export_to_hub_folder",
    "from_image_and_text_checkpoints",
    "kernel_spectrum",
    "optimizer_param_groups",
    "preset_names",
    "vqa_accuracy",
    "vqa_soft_targets",
]
