"""Docstrings in Transformers' dialect of Markdown become reStructuredText."""

import pytest

from .extract import ROOT


@pytest.fixture
def to_rst(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "_ext")
    from docstrings import to_rst

    return lambda text: "\n".join(to_rst(text.split("\n")))


@pytest.mark.parametrize(
    "markdown, expected",
    [
        ("one `code`, ``code`` and :class:`Name`", "one ``code``, ``code`` and :class:`Name`"),
        (
            "[`ITNetModel`] and [torch](https://pytorch.org)",
            ":py:obj:`ITNetModel` and `torch <https://pytorch.org>`__",
        ),
        ("|x - y| a*b u_ *optional* **bold**", r"\|x - y\| a\*b u\_ *optional* **bold**"),
        ("`code`s", r"``code``\ s"),
        ("a\n`split\ncode` b", "a\n``split\ncode`` b"),
        ("so\n\n    y = |x| * 2\n\nand", "so\n\n::\n\n    y = |x| * 2\n\nand"),
        ("Args:\n    x: a\n\nKernel:\n    y: `b`", "Args:\n    x: a\n\n**Kernel**\n\nArgs:\n    y: ``b``"),
        ("a <Tip>\n\nb\n\n</Tip> c", "a  c"),
        ("Example:\n\n```python\nx = [a * b]\n```", "Example:\n\n\n.. code-block:: python\n\n    x = [a * b]\n"),
    ],
)
def test_markdown(to_rst, markdown, expected):
    assert to_rst(markdown).strip() == expected.strip()
