"""Our INT8 experts as a MoE runner core of SGLang, tested with SGLang 0.5.23. Dense layers stay SGLang's."""

import logging
import os
from functools import cache
from typing import Any

from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore, MoeRunnerConfig
from sglang.srt.layers.moe.moe_runner.runner import MoeRunner, register_moe_runner_core
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput, StandardDispatchOutput
from sglang.srt.layers.moe.utils import resolve_moe_runner_backend
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from moe_int8.check import check_accumulator
from moe_int8.moe import fused_moe

logger = logging.getLogger("sglang.moe_int8")

BACKEND = "moe_int8"
METHOD = "sglang.srt.layers.quantization.w8a8_int8.W8A8Int8MoEMethod.create_moe_runner"
SUPPORTED: dict[str, Any] = {
    "activation": "silu",
    "is_gated": True,
    "apply_router_weight_on_input": False,
    "no_combine": False,
    "gemm1_alpha": None,
    "gemm1_clamp_limit": None,
    "swiglu_limit": None,
}


def register_core() -> None:
    """Register our core under a name of its own, since Triton's has a fused function that goes first, and let the
    method take that name."""
    register_moe_runner_core(BACKEND, Int8RunnerCore)
    HookRegistry.register(METHOD, create_moe_runner, HookType.REPLACE)


def create_moe_runner(method: Any, layer: Any, moe_runner_config: MoeRunnerConfig) -> None:
    """In place of W8A8Int8MoEMethod's own, which always takes Triton's backend."""
    method.moe_runner_config = moe_runner_config
    method.runner = MoeRunner(resolve_moe_runner_backend(BACKEND), moe_runner_config)


class Int8RunnerCore(DispatchMoeRunnerCore):
    """`fused_moe` on what SGLang's dispatcher brings.

    Raises:
        ValueError: the layer asks for what `fused_moe` cannot do, or MOE_INT8_ACCUMULATOR is unknown; names it.
    """

    def __init__(self, config: MoeRunnerConfig) -> None:
        super().__init__(config)
        for name, supported in SUPPORTED.items():
            if getattr(config, name) != supported:
                raise ValueError(
                    f"moe-int8 does not support {name} = {getattr(config, name)!r}, only {supported!r}; "
                    "SGLANG_PLUGINS=none starts SGLang without plugins"
                )
        self.accumulator = os.environ.get("MOE_INT8_ACCUMULATOR", "int32")
        check_accumulator(self.accumulator)
        _announce(self.accumulator)

    @property
    def runner_backend(self) -> Any:
        return resolve_moe_runner_backend(BACKEND)

    def run_from_dispatch(
        self,
        dispatch_output: StandardDispatchOutput,
        quant_info: Any,
        runner_config: MoeRunnerConfig,
        hooks: Any = None,
    ) -> StandardCombineInput:
        """The experts' weighted sum times the routed scaling factor, which SGLang leaves to its runners."""
        if hooks is not None:
            raise ValueError("moe-int8 does not support LoRA")
        x = dispatch_output.hidden_states
        topk_weights, topk_ids, _ = dispatch_output.topk_output
        factor = runner_config.routed_scaling_factor
        out = fused_moe(
            x,
            quant_info.w13_weight,
            quant_info.w13_scale,
            quant_info.w2_weight,
            quant_info.w2_scale,
            topk_weights,
            topk_ids,
            routed_scaling_factor=1.0 if factor is None else factor,
            accumulator=self.accumulator,
            out=x if runner_config.inplace else None,
        )
        return StandardCombineInput(hidden_states=out)


@cache
def _announce(accumulator: str) -> None:
    """Once in each process, loud enough for quiet log levels: SGLang runs on without a plugin that has failed."""
    logger.warning("moe-int8 is active: INT8 experts by moe-int8, accumulator %s", accumulator)
