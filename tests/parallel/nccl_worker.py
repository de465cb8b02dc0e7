"""One rank of tests/parallel/test_nccl.py: `torchrun nccl_worker.py FOLDER`; rank 0 writes FOLDER/ranks-<size>.pt."""

import sys
from pathlib import Path
from typing import Any

import torch

from moe_int8.models.deepseek.generate import Generator
from moe_int8.models.deepseek.sampling import SamplingParams
from moe_int8.models.deepseek.weights import load_model
from moe_int8.parallel import Groups, close_groups, init_groups, local_device

TOKENS = list(range(60))
PROMPTS = [[1, 2, 3], list(range(40)), [7] * 12]


def run(folder: Path, groups: Groups, device: torch.device) -> dict[str, Any]:
    """Logits of one text and greedy answers, in fp32; logits of the INT8 model with fp32 activations."""
    out: dict[str, Any] = {}
    for dtype in ("fp32", "int8"):
        model = load_model(
            folder, groups, device=device, dtype=dtype, activation_dtype=torch.float32, say=lambda _: None
        )
        generator = Generator(model, max_batch=2, max_model_len=128, prefill_chunk=32)
        out[f"{dtype} logits"] = generator.score(TOKENS).cpu()
        if dtype == "fp32":
            out["tokens"] = [c.tokens for c in generator.generate(PROMPTS, SamplingParams(max_new_tokens=8))]
    return out


def main() -> None:
    folder = Path(sys.argv[1])
    device = local_device("cuda")
    groups = init_groups(device, timeout_seconds=60)
    out = run(folder, groups, device)
    if groups.tp.rank == 0:
        torch.save(out, folder / f"ranks-{groups.tp.size}.pt")
    close_groups()


if __name__ == "__main__":
    main()
