"""Imports point one way: scripts -> evals, serving -> models -> parallel -> operators -> kernels -> torch, triton."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ["moe_int8", "models", "parallel", "serving", "evals", "scripts", "examples"]
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]

# A module may import from its own layer and from those below it.
BELOW = {
    "scripts": {"evals", "serving", "models", "parallel", "operators", "quantization", "basics"},
    "examples": {"operators", "basics"},
    "integrations": {"operators", "basics"},
    "evals": {"models", "parallel", "operators", "basics"},
    "serving": {"models", "parallel", "operators", "basics"},
    "models": {"parallel", "operators", "quantization", "basics"},
    "parallel": {"operators", "basics"},
    "operators": {"kernels", "quantization", "basics"},
    "quantization": {"basics"},
    "kernels": {"basics"},
    "basics": set(),
}
BASICS = {"moe_int8.custom_op", "moe_int8.numerics", "moe_int8.check", "moe_int8.dispatch", "moe_int8.tuning"}
FIRST_NAMES = {"kernels", "quantization", "integrations", "models", "parallel", "serving", "evals"}
THIRD_PARTY = {
    "kernels": {"torch", "triton"},
    "operators": {"torch"},
    "quantization": {"torch"},
    "basics": {"torch"},
    "parallel": {"torch"},
    "models": {"torch", "safetensors", "einops", "tqdm", "transformers", "jinja2"},
}


def layer_of(module: str) -> str:
    if module in BASICS:
        return "basics"
    parts = module.split(".")
    if parts[0] in ("scripts", "examples"):
        return parts[0]
    return parts[1] if len(parts) > 1 and parts[1] in FIRST_NAMES else "operators"


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] in ("moe_int8", "scripts", "examples") else ("moe_int8", *parts))


def imported(path: Path) -> set[str]:
    """Every module that the file imports, function bodies included."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            whole = node.module == "moe_int8"  # `from moe_int8 import numerics` imports a module of it
            names |= {f"moe_int8.{alias.name}" for alias in node.names} if whole else {str(node.module)}
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path):
    layer = layer_of(module_of(path))
    for name in imported(path):
        if name.split(".")[0] == "moe_int8":
            assert layer_of(name) == layer or layer_of(name) in BELOW[layer], f"{layer} imports {name}"
        else:
            assert name.split(".")[0] not in {"models", "parallel", "serving", "evals", "scripts"}, name
            allowed = THIRD_PARTY.get(layer)
            known = {"torch", "triton", "safetensors", "einops", "tqdm", "transformers", "jinja2", "numpy"}
            assert allowed is None or name.split(".")[0] not in known - allowed, f"{layer} imports {name}"


def test_the_check_sees_an_upward_import():
    assert layer_of("moe_int8.models.deepseek.model") not in BELOW[layer_of("moe_int8.parallel.linear")]
    assert layer_of("moe_int8.dense") not in BELOW[layer_of("moe_int8.kernels.gemm")]
    assert layer_of("moe_int8.models.deepseek.model") in BELOW[layer_of("scripts.generate")]


def test_only_kernels_import_triton_when_loaded():
    """A machine without Triton converts and runs on its CPU."""
    for path in FILES:
        if layer_of(module_of(path)) != "kernels":
            assert not {name for name in imported(path) if name.split(".")[0] == "triton"}, path
