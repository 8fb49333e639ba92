"""Pages of the site that are made when it is built: the README as its first, sources that pages link to, error texts.

Pages link to files as they lie in the repository (``../yafsdp_cc/engine/state.py``), so that links work there. On the
site such a file is a page below ``source/``, and a folder is a table of its files by their first lines.
"""

from __future__ import annotations

import ast
import html
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)(?=[)#])")
REFERENCE = re.compile(r"^\* `([\w.]+)`(?:: (.*(?:\n  .*)*))?$", re.MULTILINE)
"""A line of ``docs/reference.md``: a module, and names in it with commas between them unless all of it is meant."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the README and the pages of sources."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    texts = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in pages}
    linked = {_repository_path(page, link) for page, text in texts.items() for link in LINK.findall(text)}
    for path in sorted(linked):
        if not path.startswith("docs/") and path != "README.md":
            files.append(File.generated(config, f"source/{path}.md", content=_source_page(ROOT / path)))
    files.append(File.generated(config, "index.md", content=texts["README.md"]))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to files of the repository into links to pages of the site."""
    is_source = page.file.src_uri.startswith("source/")
    if is_source and not page.file.src_uri.endswith(".md.md"):
        return markdown
    if page.file.src_uri == "troubleshooting.md":
        markdown += _error_texts()
    if page.file.src_uri == "reference.md":
        markdown = REFERENCE.sub(_docstrings, markdown)
    origin = "README.md" if page.file.src_uri == "index.md" else f"docs/{page.file.src_uri}"
    if is_source:
        origin = page.file.src_uri.removeprefix("source/").removesuffix(".md")
    here = posixpath.dirname(page.file.src_uri)

    def on_site(link: re.Match[str]) -> str:
        path = _repository_path(origin, link[1])
        inside = path == "README.md" or path.startswith("docs/")
        target = {"README.md": "index.md"}.get(path, path.removeprefix("docs/")) if inside else f"source/{path}.md"
        return posixpath.relpath(target, here or ".")

    return LINK.sub(on_site, markdown)


def _repository_path(page: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def _source_page(path: Path) -> str:
    """Return the page of a file or folder. Raises ``FileNotFoundError`` where a link names nothing."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        listed = sorted([*path.glob("*.py"), *path.glob("*.md")])
        rows = [f"| `{each.name}` | {_first_line(each)} |" for each in listed]
        return "\n".join([f"# `{name}/`", "", "| file | what it is |", "|---|---|", *rows])
    if path.suffix == ".md":
        return path.read_text(encoding="utf-8")
    return f"# `{name}`\n\n~~~~{path.suffix.removeprefix('.')}\n{path.read_text(encoding='utf-8')}\n~~~~\n"


def _first_line(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    return text.partition("\n")[0].removeprefix("# ")


def _docstrings(line: re.Match[str]) -> str:
    """Return what has mkdocstrings show the docstrings of a line of the reference."""
    module, names = f"::: yafsdp_cc.{line[1]}", line[2]
    return "\n".join(f"{module}.{name.strip()}" for name in names.split(",")) if names else module


def _error_texts() -> str:
    """Return a table of what the package raises and warns of. What a text is filled with stands in ‹ ›."""
    lines = ["", "## Every error and warning of the package", "", "| text | kind | where |", "|---|---|---|"]
    for path in sorted((ROOT / "yafsdp_cc").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            call = node.exc if isinstance(node, ast.Raise) else node
            if not isinstance(call, ast.Call) or not call.args:
                continue
            kind = "warning" if ast.unparse(call.func) == "warnings.warn" else ast.unparse(call.func)
            text = _text_of(call.args[0])
            if text and (isinstance(node, ast.Raise) or kind == "warning"):
                cell = (
                    html.escape(" ".join(text.split()))
                    .replace("|", "&#124;")
                    .replace("*", "&#42;")
                    .replace("_", "&#95;")
                )
                where = path.relative_to(ROOT / "yafsdp_cc").with_suffix("").as_posix()
                lines.append(f"| {cell} | `{kind}` | `{where}` |")
    return "\n".join([*lines, ""])


def _text_of(node: ast.expr) -> str:
    """Return a text as it stands in the source; empty where it is made elsewhere."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text_of(value) for value in node.values)
    if isinstance(node, ast.FormattedValue):
        return f"‹{ast.unparse(node.value)}›"
    if isinstance(node, ast.BinOp):
        return _text_of(node.left) + _text_of(node.right)
    return ""
