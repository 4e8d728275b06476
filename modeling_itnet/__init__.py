# SPDX-License-Identifier: Apache-2.0
"""ITNet for Transformers. Importing this package registers its classes with the Auto classes."""

from configuration_itnet import ITNetConfig, preset_names

from ._version import __version__
from .analysis.diagnosis import KernelDiagnosis, diagnose_kernels
from .analysis.spectrum import KernelSpectrum, kernel_spectrum
from .domain import Signal
from .heads import (
    ITNetForGraphClassification,
    ITNetForImageClassification,
    ITNetForImagesAndTextClassification,
    ITNetForMaskedLM,
    ITNetForPointCloudClassification,
    ITNetForQuestionAnswering,
    ITNetForSequenceClassification,
    ITNetForSignalRegression,
    ITNetForTokenClassification,
    ITNetForVisualQuestionAnswering,
    vqa_accuracy,
    vqa_soft_targets,
)
from .hub import export_to_hub_folder
from .hub.auto import register_auto_classes
from .hub.multimodal_checkpoints import from_image_and_text_checkpoints
from .hub.pipelines import register_pipelines
from .integration.low_rank_fit import LowRankReport
from .modeling_itnet import ITNetModel, ITNetPreTrainedModel
from .operator import ITNetFourierFeatures, ITNetOperator
from .processing import ITNetGraphProcessor, ITNetImageProcessor, ITNetPointCloudProcessor, ITNetProcessor
from .training.optimization import optimizer_param_groups

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
