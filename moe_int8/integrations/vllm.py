"""vLLM's entry point into this package (group `vllm.general_plugins`), called in each of its processes.

What is set by the environment, since vLLM starts processes of its own:

    MOE_INT8_ACCUMULATOR               "int32" (default) or "fp32", of the int8 GEMMs
    MOE_INT8_VLLM_COMPRESSED_TENSORS   "0": leave compressed-tensors checkpoints to vLLM
    MOE_INT8_VLLM_DENSE                "1": our dense layers on GPUs too, where vLLM has its own; on a CPU always ours
"""

import logging

logger = logging.getLogger("vllm.moe_int8")  # under vLLM's own name, or its log would not show it


def register() -> None:
    """Give vLLM the method `w8a8_int8`, and our operators to INT8 checkpoints of compressed-tensors.

    Never raises: an exception here would end vLLM.
    """
    try:
        from moe_int8.integrations.vllm_int8 import register_methods

        register_methods()
    except Exception as error:  # whatever is wrong with us, or new in vLLM, vLLM shall start
        logger.warning(
            "moe-int8 is not active, vLLM runs without it (%s: %s). It is tested with vLLM 0.32: install that, or a "
            "newer moe-int8, or uninstall moe-int8 to be rid of this line",
            type(error).__name__,
            " ".join(str(error).split()),
        )
