# SPDX-License-Identifier: Apache-2.0
"""Puts tensors and a description of them into one HTML file."""

import base64
import html
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

PAGE = Path(__file__).parent / "page"
SCRIPTS = ("numbers.js", "fields.js", "drawing.js", "views.js", "charts.js", "explorer.js")


class Numbers:
    """Keeps tensors one after the other as bytes."""

    def __init__(self, precision: str):
        self.precision, self.bytes = precision, bytearray()

    def add(self, tensor: Tensor, *, is_exact: bool = False) -> dict[str, Any]:
        """Stores a tensor in the page's precision, or in float32 if ``is_exact``; returns where the page finds it."""
        values = tensor.detach().cpu()
        if values.dtype == torch.bool:
            stored, kind = np.packbits(values.numpy(), axis=-1, bitorder="little"), "bits"
        elif values.is_floating_point():
            kind = "float32" if is_exact else self.precision
            stored = values.to(getattr(torch, kind)).numpy()
        else:
            stored, kind = values.to(torch.int32).numpy(), "int32"
        self.bytes += bytes(-len(self.bytes) % 4)
        found = {"offset": len(self.bytes), "shape": list(values.shape), "type": kind}
        self.bytes += np.ascontiguousarray(stored).tobytes()
        return found


def write_page(description: dict[str, Any], numbers: Numbers) -> str:
    """Returns the text of the page, which loads no part of itself from elsewhere."""
    text = json.dumps(description, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    parts = {
        "title": html.escape(description["title"]),
        "style": (PAGE / "page.css").read_text(encoding="utf-8"),
        "description": text,
        "numbers": base64.b64encode(bytes(numbers.bytes)).decode(),
        "script": "\n".join((PAGE / name).read_text(encoding="utf-8") for name in SCRIPTS),
    }
    page = (PAGE / "page.html").read_text(encoding="utf-8")
    before, *pieces = page.split("{{")
    for piece in pieces:
        name, after = piece.split("}}", 1)
        before += parts[name] + after
    return before
