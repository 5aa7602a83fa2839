"""How the product's Python is laid out: lines and files by folder, functions, and who imports whom.

python -m tools.house [FOLDER]    # of another commit's tree, to compare

The files that a request crosses, tools/crossing.py counts.
"""

from __future__ import annotations

import ast
import statistics
import sys
from collections import Counter
from itertools import permutations
from pathlib import Path

PACKAGE = "hex_llm"


def folder_of(path: Path) -> str:
    return path.parts[1] if len(path.parts) > 2 else "."


def function_lengths(tree: ast.Module) -> list[int]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    return [(node.end_lineno or node.lineno) - node.lineno + 1 for node in found]


def imported_folders(tree: ast.Module) -> set[str]:
    names = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    return {name.split(".")[1] for name in names if name.startswith(f"{PACKAGE}.")}


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    files = sorted(path.relative_to(root) for path in (root / PACKAGE).rglob("*.py"))
    lines: Counter[str] = Counter()
    num_files: Counter[str] = Counter()
    biggest, functions = (0, ""), list[int]()
    imports: dict[str, set[str]] = {}
    for path in files:
        text = (root / path).read_text()
        count, folder, tree = len(text.splitlines()), folder_of(path), ast.parse(text)
        lines[folder] += count
        num_files[folder] += 1
        biggest = max(biggest, (count, str(path)))
        functions += function_lengths(tree)
        imports.setdefault(folder, set()).update(imported_folders(tree))
    for folder, count in lines.most_common():
        print(f"{folder:12} {count:6} lines {num_files[folder]:4} files")
    print(f"{'in all':12} {lines.total():6} lines {num_files.total():4} files")
    print(f"biggest file: {biggest[1]}, {biggest[0]} lines")
    print(f"functions: median {statistics.median(functions):g} lines, longest {max(functions)}")
    mutual = [(a, b) for a, b in permutations(imports, 2) if a < b and b in imports[a] and a in imports[b]]
    print(f"folders that import each other: {len(mutual)} {mutual or ''}")


if __name__ == "__main__":
    main()
