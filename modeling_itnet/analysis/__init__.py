# SPDX-License-Identifier: Apache-2.0
"""What a trained kernel is like: its matrices, diagnosis, spectrum and pictures; what a model costs."""
