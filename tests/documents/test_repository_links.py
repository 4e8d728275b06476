"""Links of a clone become links of the site."""

import pytest

from .extract import ROOT


@pytest.fixture
def rewrite(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "_ext")
    from repository_links import rewrite

    return rewrite


@pytest.mark.parametrize(
    "folder, text, expected",
    [
        (".", "[a](docs/limits.md)", "[a](/limits.md)"),
        (".", "![a](docs/figures/kernels-boot.png)", "![a](/figures/kernels-boot.png)"),
        ("docs", "[a](guides/own_text.py)", "[a](/generated/guides/own_text.rst)"),
        ("docs", "[a](../CONTRIBUTING.md#a-new-modality)", "[a](/contributing.md#a-new-modality)"),
        ("docs", "[a](../kernels/itnet_kernels/README.md)", "[a](/mathematics.md)"),
        ("docs", "[constraints.txt](../constraints.txt)", "constraints.txt"),  # not on the site
        (
            "docs",
            "[a](https://example.org/x) `f[0](x)` [b](#speed)",
            "[a](https://example.org/x) `f[0](x)` [b](#speed)",
        ),
        ("docs", "[a](missing.md)", "[a](missing.md)"),  # of which Sphinx warns
    ],
)
def test_links(rewrite, folder, text, expected):
    assert rewrite(text, ROOT / folder) == expected
