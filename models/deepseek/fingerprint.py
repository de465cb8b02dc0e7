"""Short values that differ when checkpoints do, so that nodes can compare theirs before they load."""

import hashlib

from moe_int8.models.deepseek.weights import ModelFiles

SAMPLE = "model.norm.weight"  # small, in every model, and changed by any training


def fingerprint(files: ModelFiles) -> dict[str, str]:
    """Three hashes by what they are of: config.json as the model reads it; name, format and shape of every tensor; and
    the values of one tensor, for checkpoints that differ in nothing else.

    Raises:
        CheckpointError: the tensor is missing.
    """
    checkpoint = files.checkpoint
    names = checkpoint.names()
    layout = [(name, checkpoint.file_of(name), checkpoint.dtype(name), checkpoint.shape(name)) for name in names]
    values = checkpoint.tensor(SAMPLE).tolist()
    hashed = {"config.json": files.config, "tensors": layout, SAMPLE: values}
    return {f"checkpoint's {what}": hashlib.sha256(repr(it).encode()).hexdigest()[:12] for what, it in hashed.items()}
