"""What the README claims is computed here again, and what it shows is run."""

import re
import subprocess
import sys
from pathlib import Path

import torch

from moe_int8.models.deepseek.cache import LatentCache
from moe_int8.models.deepseek.config import DeepseekConfig
from moe_int8.models.deepseek.memory import weight_bytes
from moe_int8.models.deepseek.precision import Precision

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
R1 = DeepseekConfig.from_dict(
    {
        "architectures": ["DeepseekV3ForCausalLM"],
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 163840,
    }
)


def test_c80_fp8_and_the_memory_per_gpu_are_on_the_first_screen():
    screen = "\n".join(README.splitlines()[:30])
    assert "FP8 weights do not run on an A100" in screen
    assert "python scripts/convert.py" in screen
    for name, int8 in (("INT8", True), ("BF16", False)):
        precision = Precision(torch.bfloat16, lambda _, int8=int8: int8)
        cells = " | ".join(f"{weight_bytes(R1, precision, tp) / 1e9:.1f} GB" for tp in (8, 16, 32))
        assert f"| {name} | {cells} |" in screen
    assert f"Add {LatentCache.bytes_per_token(R1, torch.bfloat16) * 1000 / 1e6:.0f} MB for every 1,000 tokens" in README


def test_the_code_runs():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    scope: dict[str, torch.Tensor] = {}
    exec(code, scope)
    assert scope["y"].shape == (4, 512)
    assert scope["out"].shape == (4, 256)
    assert scope["out"].isfinite().all()
    assert scope["out"].any()


def test_the_files_and_commands_exist():
    for path in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / path).exists(), path
    for script in re.findall(r"scripts/(\w+)\.py", README):
        assert (ROOT / "scripts" / f"{script}.py").exists(), script
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"make ([a-z-]+)", README):
        assert target in targets, target


def test_c81_the_tested_versions_are_the_pinned_ones():
    pins = (ROOT / "constraints.txt").read_text()
    for name, version in re.findall(r"(torch|Triton) (\d+\.\d+\.\d+)", README.split("## Tested versions")[1])[:2]:
        assert f"{name.lower()}=={version}" in pins


def test_the_measured_tables_are_those_of_the_result_files():
    subprocess.run([sys.executable, ROOT / "scripts" / "readme_tables.py", "--check"], check=True, timeout=60)
