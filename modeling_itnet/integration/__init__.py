# SPDX-License-Identifier: Apache-2.0
"""Ways to take the integral: the choice of a mode, and what each mode needs."""
