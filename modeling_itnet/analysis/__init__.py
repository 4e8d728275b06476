# SPDX-License-Identifier: Apache-2.0
"""Shows what a trained kernel is like (its matrices, diagnosis, spectrum and pictures) and what a model costs."""
