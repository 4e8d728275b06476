# SPDX-License-Identifier: Apache-2.0
"""Generating texts: the cache of a causal model, and one step of decoding as a function of tensors."""
