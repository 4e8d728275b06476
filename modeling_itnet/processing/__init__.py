# SPDX-License-Identifier: Apache-2.0
"""Processors: what turns images, texts, point clouds and graphs into the tensors that models take."""

from .graph import ITNetGraphProcessor
from .image import ITNetImageProcessor
from .multimodal import ITNetProcessor
from .point_cloud import ITNetPointCloudProcessor
from .point_files import read_points

__all__ = ["ITNetGraphProcessor", "ITNetImageProcessor", "ITNetPointCloudProcessor", "ITNetProcessor", "read_points"]
