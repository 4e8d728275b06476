# SPDX-License-Identifier: Apache-2.0
"""The kernel explorer: one HTML file that evaluates learned kernels in the reader's browser.

``collect.py`` takes what the page needs out of a model, ``views.py`` says how a sample is drawn, ``packing.py`` puts
numbers into a page of bounded size, and ``page/`` holds the page itself: HTML, CSS and the scripts that evaluate and
draw kernels.
"""

from .explore import explore_kernels

__all__ = ["explore_kernels"]
