# SPDX-License-Identifier: Apache-2.0
"""ITNet for Transformers. Importing this package registers its classes with the Auto classes."""

from configuration_itnet import Head, ITNetConfig, Modality, preset_names

from ._version import __version__
from .analysis.diagnosis import KernelDiagnosis, diagnose_kernels
from .analysis.spectrum import KernelSpectrum, kernel_spectrum
from .domain import Domain, Signal
from .generation.cache import ITNetCache
from .heads.causal_lm import ITNetForCausalLM
from .heads.graph import ITNetForGraphClassification
from .heads.image import ITNetForImageClassification
from .heads.multimodal import (
    ITNetForImagesAndTextClassification,
    ITNetForVisualQuestionAnswering,
    vqa_accuracy,
    vqa_soft_targets,
)
from .heads.point_cloud import ITNetForPointCloudClassification
from .heads.signal import ITNetForSignalRegression
from .heads.text import (
    ITNetForMaskedLM,
    ITNetForQuestionAnswering,
    ITNetForSequenceClassification,
    ITNetForTokenClassification,
)
from .hub import export_to_hub_folder
from .hub.auto import register_auto_classes, register_modality
from .integration.fit import FitReport
from .modeling_itnet import ITNetModel, ITNetPreTrainedModel
from .operator import ITNetFourierFeatures, ITNetOperator
from .processing import ITNetGraphProcessor, ITNetImageProcessor, ITNetPointCloudProcessor, ITNetProcessor
from .training.multimodal_start import from_image_and_text_checkpoints
from .training.optimization import optimizer_param_groups

register_auto_classes()

__all__ = [
    "Domain",
    "FitReport",
    "Head",
    "ITNetCache",
    "ITNetConfig",
    "ITNetForCausalLM",
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
    "Modality",
    "Signal",
    "__version__",
    "diagnose_kernels",
    "export_to_hub_folder",
    "from_image_and_text_checkpoints",
    "kernel_spectrum",
    "optimizer_param_groups",
    "preset_names",
    "register_modality",
    "vqa_accuracy",
    "vqa_soft_targets",
]
