"""SGLang's entry point into this package (group `sglang.srt.plugins`), called in each of its processes.

MOE_INT8_ACCUMULATOR in the environment is "int32" (the default) or "fp32".
"""

import logging

logger = logging.getLogger("sglang.moe_int8")


def register() -> None:
    """Give the experts of `--quantization w8a8_int8` to us. Never raises: SGLang shall start without us too."""
    try:
        from moe_int8.integrations.sglang_int8 import register_core

        register_core()
    except Exception as error:  # whatever is wrong with us, or new in SGLang
        logger.warning(
            "moe-int8 is NOT active, SGLang runs its own kernels (%s: %s). It is tested with SGLang 0.5.23: install "
            "that, or a newer moe-int8, or uninstall moe-int8 to be rid of this line",
            type(error).__name__,
            " ".join(str(error).split()),
        )
