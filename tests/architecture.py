"""What the layout stands on, as functions from source text to findings (see tests/test_architecture.py)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "locant"

# unit: the units that it may import, and all that those may import. A unit is a module or a folder of src/locant.
DIRECT: dict[str, tuple[str, ...]] = {
    "positions": (),
    "terms": ("positions",),
    "encoding": ("terms",),
    "catalog": ("encoding",),
    "encodings": ("catalog",),
    "transform": ("encoding",),
    "transforms": ("transform",),
    "backends": ("terms",),
    "attention": ("backends",),
    "__init__": ("encodings", "transforms", "attention"),
    "models": ("__init__",),
    "graphs": ("__init__",),
    "lengthgen": ("__init__",),
    "data": ("__init__",),
    "hf": ("__init__",),
    "testing": ("models",),
    "tasks": ("hf", "models", "graphs", "data"),
    "training": ("hf", "models", "graphs", "data"),
    "analysis": ("hf", "models", "graphs", "data"),
    "compare": ("tasks", "training", "analysis", "lengthgen"),
    "finetune": ("compare",),
    "pretrain": ("compare",),
    "bench": ("compare",),
    "plots": ("compare", "bench"),
    "report": ("plots", "finetune", "pretrain"),
    "cli": ("report", "testing", "finetune", "pretrain"),
    "__main__": ("cli",),
}
NO_SIBLINGS = ("encodings", "transforms")  # one file for each paper; what two of them need lives below them
# names() walks the folder of encodings: the catalog knows where they lie, and none of them by name.
EXCEPT = {("locant.catalog", "locant.encodings")}
SOFTMAX = ("attention", "backends", "analysis")
NAMELESS = {"util", "utils", "common", "misc", "helper", "helpers"}


def allowed(unit: str) -> set[str]:
    """Return every unit that this one may import."""
    found: set[str] = set()
    for below in DIRECT[unit]:
        found |= {below} | allowed(below)
    return found


def module_name(path: Path, package: Path = PACKAGE) -> str:
    """Return the dotted name of a source file, with __init__ kept: locant.hf.__init__."""
    return ".".join(("locant", *path.relative_to(package).with_suffix("").parts))


def imported_modules(source: str, module: str) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of each import, also inside functions; `from a import b` yields a.b."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{stem}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and called_name(node) in {"import_module", "__import__"} and node.args:
            if isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def called_name(node: ast.Call) -> str:
    """Return the last part of what is called: softmax for torch.nn.functional.softmax(...)."""
    function = node.func
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def backward_imports(source: str, module: str) -> list[str]:
    """Return the imports of locant that point the wrong way, or to a sibling where siblings are independent."""
    unit, findings = module.split(".")[1], []
    if unit not in DIRECT:
        return [f"{module}: {unit!r} has no place among the layers; give it one in tests/architecture.py"]
    for line, target in imported_modules(source, module):
        parts = target.split(".")
        if parts[0] != "locant" or (module, target) in EXCEPT:
            continue
        to = parts[1] if len(parts) > 1 and parts[1] in DIRECT else "__init__"
        if to == unit:
            inside = parts[2] if len(parts) > 2 else "__init__"
            if unit in NO_SIBLINGS and module.split(".")[2] != "__init__" and inside != module.split(".")[2]:
                findings.append(f"{module}:{line} imports its sibling {target}")
        elif to not in allowed(unit):
            findings.append(f"{module}:{line} imports {target}, which is not below {unit}")
    return findings


def foreign_imports(source: str, module: str, name: str) -> list[str]:
    """Return where a module imports the library `name`."""
    lines = [line for line, target in imported_modules(source, module) if target.split(".")[0] == name]
    return [f"{module}:{line} imports {name}" for line in lines]


def softmax_calls(source: str, module: str) -> list[str]:
    """Return where softmax is called, or built as a module, outside the units that may."""
    if module.split(".")[1] in SOFTMAX:
        return []
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [
        f"{module}:{node.lineno} calls softmax"
        for node in calls
        if called_name(node).lower() in {"softmax", "_softmax"}
    ]


def nameless_files(paths: list[Path]) -> list[str]:
    """Return the files and folders whose name says nothing about their subject."""
    return [str(path) for path in paths if NAMELESS & {part.lower().strip("_").split(".")[0] for part in path.parts}]
