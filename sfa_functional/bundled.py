"""What comes with the package: a tiny trained checkpoint, the text that it learnt from, and text that it never saw.

The texts are those of CPython itself: docstrings of the standard library and the topics of ``pydoc_data``.
"""

import ast
import re
import sysconfig
import zlib
from pathlib import Path

TINY_CHECKPOINT = Path(__file__).parent / "data" / "tiny-dsa"
"""Directory of a DeepSeek-V3.2 model with four layers; bytes are tokens. ``data/make_tiny_dsa.py`` trains it."""


def held_out_text() -> str:
    """Return the topics of ``pydoc_data`` that are kept for evaluation, joined in the order of their names.

    A topic is held out iff ``crc32(name) % 10 == 1``, so that the choice is the same whatever else a Python version
    adds.
    """
    return "\n\n".join(text.strip() for name, text in _topics() if _held_out(name)) + "\n"


def training_text() -> str:
    """Return the other topics and the docstrings of the standard library, without any held-out paragraph.

    Topics repeat each other's sections, so paragraphs are compared one by one, white space folded.
    """
    seen = {_folded(p) for p in _paragraphs(held_out_text())}
    texts = [text for name, text in _topics() if not _held_out(name)] + _docstrings()
    kept: list[str] = []
    for text in texts:
        paragraphs = [p for p in _paragraphs(text) if _folded(p) not in seen]
        seen.update(_folded(p) for p in paragraphs if len(p) > 200)
        kept.append("\n\n".join(paragraphs))
    return "\n\n".join(text for text in kept if text) + "\n"


def _topics() -> list[tuple[str, str]]:
    from pydoc_data.topics import topics  # 700 KB, wanted only here

    return sorted(topics.items())


def _held_out(name: str) -> bool:
    return zlib.crc32(name.encode()) % 10 == 1


def _paragraphs(text: str) -> list[str]:
    return [p for p in re.split(r"\n\s*\n", text) if p.strip()]


def _folded(paragraph: str) -> str:
    return " ".join(paragraph.split())


def _docstrings() -> list[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "test", "tests", "lib2to3", "pydoc_data", "__pycache__"}
    found = []
    for path in sorted(root.rglob("*.py")):
        if skipped & set(path.relative_to(root).parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):  # a few files are broken on purpose
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text and len(text) > 60:
                    found.append(text)
    return found
