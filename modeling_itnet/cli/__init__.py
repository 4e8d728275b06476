# SPDX-License-Identifier: Apache-2.0
"""The sub-commands of ``itnet``, one file per group; ``itnet_command`` lists them and loads the one that is called."""

from itnet_command import app, main

__all__ = ["app", "main"]
