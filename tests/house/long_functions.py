"""Lists functions of more than 120 lines; exits with 1 when there is one. Part of ``make check``."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

LONGEST = 120
ROOT = Path(__file__).parents[2]


def long_functions(source: str, name: str) -> list[str]:
    """``file:line function (n lines)`` for each function of ``source`` above the limit."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > LONGEST:
                found.append(f"{name}:{node.lineno} {node.name} ({lines} lines)")
    return found


def main() -> int:
    folders = [ROOT / name for name in ("src", "tests", "benchmarks", "docs", "examples")]
    files = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    found = [line for path in files for line in long_functions(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT)))]
    print("\n".join(found) or f"No function above {LONGEST} lines in {len(files)} files.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
