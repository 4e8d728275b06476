"""Makes reStructuredText of docstrings in Transformers' dialect of Markdown, before napoleon reads their sections.

Both dialects of the project pass: one backtick and two are code, [`Name`] is a link, a paragraph that is indented by
four or more is a formula, a fence holds Python, "Title:" over indented names begins a group of arguments, and <Tip> is
a note that every model has.
"""

import re
import textwrap

SECTION = re.compile(r"^\s*(Args|Parameters|Returns|Yields|Raises|Example|Examples|Attributes|Note):\s*$")
TIP = re.compile(r"<Tip.*?</Tip>", re.DOTALL)
FENCE = re.compile(r"^ *```python\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
GROUP = re.compile(r"^([A-Z][^:]*):\n +\w+: ")
#: What stays as it is or becomes code or a link; whatever stands between two of these is plain text.
INLINE = re.compile(
    r"``[^`]+``|:[\w:]+:`[^`]+`|\[`(?P<link>[^`]+)`\]|\[(?P<title>[^\]`]+)\]\((?P<url>https?://[^)\s]+)\)"
    r"|`(?P<code>[^`]+)`|\*\*\w[^*]*\*\*|(?<!\w)\*\w[^*\n]*\*(?!\w)"
)


def inline(text: str) -> str:
    """Writes code, links and emphasis of Markdown in reStructuredText; all other marks mean themselves."""
    parts, end = [], 0
    for match in INLINE.finditer(text):
        parts.append(plain(text[end : match.start()]))
        if match["link"]:
            parts.append(f":py:obj:`{match['link']}`")
        elif match["url"]:
            parts.append(f"`{match['title']} <{match['url']}>`__")
        elif match["code"]:
            parts.append(f"``{match['code']}``")
        else:
            parts.append(match[0])
        end = match.end()
        if end < len(text) and (text[end].isalnum() or text[end] in "_[({²"):
            parts.append("\\ ")  # code must end before a word begins
    return "".join([*parts, plain(text[end:])])


def plain(text: str) -> str:
    return re.sub(r"([*|]|_(?!\w))", r"\\\1", text)


def indent_of(line: str) -> int:
    return len(line) - len(line.lstrip())


def paragraphs(lines: list[str]) -> list[tuple[bool, list[str]]]:
    """Runs of lines as (is a formula, lines), with the blank lines between them."""
    found, base, blank_before = [], 0, True
    for line in lines:
        if not line.strip():
            found.append((False, [""]))
            blank_before = True
            continue
        if blank_before:
            before = next((text[-1] for _, text in reversed(found) if text[-1]), "")
            in_formula = bool(found) and any(text[-1] for _, text in found) and base + 4 <= indent_of(line)
            found.append((in_formula and not SECTION.match(before) and not before.endswith("::"), [line]))
        else:
            found[-1][1].append(line)
        if not found[-1][0]:
            base = indent_of(line)
        blank_before = False
    return found


def to_rst(lines: list[str]) -> list[str]:
    out: list[str] = []
    pieces = FENCE.split(TIP.sub("", "\n".join(lines)))  # text and Python in turns
    for number, piece in enumerate(pieces):
        if number % 2:
            out += [".. code-block:: python", "", *textwrap.indent(textwrap.dedent(piece), "    ").split("\n")]
        else:
            out += text_to_rst(piece.split("\n"))
    return out


def text_to_rst(lines: list[str]) -> list[str]:
    out: list[str] = []
    for is_formula, text in paragraphs(lines):
        group = None if SECTION.match(text[0]) else GROUP.match("\n".join(text))
        if is_formula:
            margin = " " * (indent_of(text[0]) - 4)
            out += [f"{margin}::", "", *text]
        elif group:
            out += [f"**{group[1]}**", "", "Args:", *inline("\n".join(text[1:])).split("\n")]
        else:
            out += inline("\n".join(text)).split("\n")
    return out


def process(app, what, name, obj, options, lines: list[str]) -> None:
    # A tuple or a table would show the docstring of its type.
    lines[:] = ["Holds " + ", ".join(f"``{item}``" for item in obj) + "."] if what == "data" else to_rst(lines)


def setup(app) -> dict:
    app.connect("autodoc-process-docstring", process, priority=400)  # before napoleon, at 500
    return {"parallel_read_safe": True}
