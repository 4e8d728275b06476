# SPDX-License-Identifier: Apache-2.0
"""What training needs beside the model: optimizer groups, the trainer, recipes, LoRA."""
