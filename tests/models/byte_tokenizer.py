"""A tokenizer of single bytes, so that any random model's output is text."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())  # one character stands for each byte
EOS = len(BYTES)
VOCAB_SIZE = len(BYTES) + 2


def write_tokenizer(folder: Path) -> None:
    """Write tokenizer, chat template and greedy generation_config.json into a checkpoint's folder."""
    vocab = {character: index for index, character in enumerate(BYTES)} | {"<eos>": EOS, "<bos>": EOS + 1}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>", "<bos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{{ bos_token }}{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}assistant:"
    settings = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS, "do_sample": False}))
