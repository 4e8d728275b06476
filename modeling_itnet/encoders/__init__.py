# SPDX-License-Identifier: Apache-2.0
"""Encoders: what turns the inputs of a modality into a :class:`Signal`, one file per modality.

An encoder names the forward arguments it takes (``required``, of which exactly one must be given, and ``optional``),
gives its ``main_input_name`` and ``input_embeddings()``, and is called with those arguments and the Fourier features.
If it owns tensors that are not in one of its layers, ``reset_own_parameters(config)`` sets them.
"""
