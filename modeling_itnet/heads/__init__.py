# SPDX-License-Identifier: Apache-2.0
"""Task heads: a read-out of ITNetModel and the task's loss, one file per modality."""
