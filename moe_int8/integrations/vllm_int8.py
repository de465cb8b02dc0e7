"""Our INT8 experts and dense layers as methods of vLLM's compressed-tensors quantization, tested with vLLM 0.32.

vLLM's classes create and load the weights; what is ours computes. The experts take part in vLLM's modular kernel, so
that vLLM prepares and sums up over ranks (TP, EP, DP) around them.
"""

import inspect
import os
from typing import Any

import torch
import torch.nn.functional as F
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from compressed_tensors.quantization import QuantizationArgs
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig
from vllm.model_executor.layers.fused_moe.oracle.int8 import Int8MoeBackend
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import CompressedTensorsMoEMethod
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w8a8_int8 as vllm_moe,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsW8A8Int8
from vllm.model_executor.layers.quantization.utils.quant_utils import kInt8DynamicTokenSym, kInt8StaticChannelSym
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform

from moe_int8.check import check_accumulator
from moe_int8.dense import w8a8_linear
from moe_int8.moe import fused_moe
from moe_int8.quantize import dequantize

logger = init_logger("vllm.moe_int8")

CHANNEL_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
TOKEN_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
NOT_QUANTIZED = ["lm_head", r"re:.*mlp\.gate$", r"re:.*eh_proj$", r"re:.*shared_head\.head$"]
ALL2ALL = ("allgather_reducescatter", "deepep_high_throughput")  # that leave the tokens in one [M, H] tensor


def accumulator() -> str:
    """What MOE_INT8_ACCUMULATOR says, "int32" if nothing.

    Raises:
        ValueError: it is neither "int32" nor "fp32".
    """
    value = os.environ.get("MOE_INT8_ACCUMULATOR", "int32")
    try:
        check_accumulator(value)
    except ValueError as error:
        raise ValueError(f"MOE_INT8_ACCUMULATOR: {error}") from error
    return value


def register_methods() -> None:
    """Register with vLLM, all or nothing.

    Raises:
        ImportError, AttributeError: this vLLM has not what we use.
        TypeError: it has, but asks for other methods or arguments than we have.
    """
    _check_interface()
    register_quantization_config("w8a8_int8")(W8A8Int8Config)
    if os.environ.get("MOE_INT8_VLLM_COMPRESSED_TENSORS") != "0":
        register_quantization_config("compressed-tensors")(Int8CompressedTensorsConfig)


class Int8CompressedTensorsConfig(CompressedTensorsConfig):
    """compressed-tensors, with layers of INT8 weights a channel and INT8 activations a token computed by us."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if isinstance(layer, RoutedExperts) and _on_our_device():
            self._add_fused_moe_to_target_scheme_map()
            names = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
            schemes = [self.get_scheme_dict(layer, f"{prefix}.0.{name}") for name in names]
            if all(_is_channel_int8(scheme) for scheme in schemes):
                _announce()
                return Int8MoEMethod(layer.moe_config, schemes[0])
        return super().get_quant_method(layer, prefix)

    def get_scheme(self, layer: torch.nn.Module, layer_name: str | None = None) -> Any:
        if _dense_is_ours() and _is_channel_int8(self.get_scheme_dict(layer, layer_name)):
            _announce()
            is_kv_b = (layer_name or "").endswith("kv_b_proj")
            return Int8DequantizedScheme() if is_kv_b else Int8Scheme()
        return super().get_scheme(layer, layer_name)


class W8A8Int8Config(Int8CompressedTensorsConfig):
    """The method `w8a8_int8`: every projection is INT8, but for those in `ignore`. As compressed-tensors otherwise."""

    def __init__(self, **settings: Any) -> None:
        """Without arguments it is the config of a checkpoint that has none."""
        super().__init__(**(settings or self._settings({})))

    @classmethod
    def get_name(cls) -> str:
        return "w8a8_int8"

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "W8A8Int8Config":
        return cls(**cls._settings(config))

    @classmethod
    def _settings(cls, config: dict[str, Any]) -> dict[str, Any]:
        group = {"targets": ["Linear"], "weights": CHANNEL_INT8, "input_activations": TOKEN_INT8}
        whole = {"format": "int-quantized", "config_groups": {"group_0": group}}
        return {
            "target_scheme_map": cls._quantization_scheme_map_from_config(whole),
            "ignore": [*NOT_QUANTIZED, *(config.get("ignore") or [])],
            "quant_format": "int-quantized",
            "config": whole,
        }


class Int8Scheme(CompressedTensorsW8A8Int8):
    """A dense layer: vLLM's weights, our product."""

    def __init__(self) -> None:
        super().__init__(strategy="channel", is_static_input_scheme=False, input_symmetric=True)
        self.accumulator = accumulator()

    def process_weights_after_loading(self, layer: Any) -> None:
        for name in ("weight", "weight_scale"):  # plain parameters: vLLM's own only know how to be loaded
            replace_parameter(layer, name, getattr(layer, name).data)

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return w8a8_linear(x, layer.weight, layer.weight_scale, bias, accumulator=self.accumulator)


class Int8DequantizedScheme(Int8Scheme):
    """kv_b_proj: prefill multiplies it with latents, decode with queries, and only a floating-point weight makes the
    two agree."""

    def create_weights(self, layer: Any, **settings: Any) -> None:
        super().create_weights(layer, **settings)
        self.dtype = settings["params_dtype"]

    def process_weights_after_loading(self, layer: Any) -> None:
        replace_parameter(layer, "weight", dequantize(layer.weight.data, layer.weight_scale.data, self.dtype))

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, layer.weight, bias)


class Int8MoEMethod(vllm_moe.CompressedTensorsW8A8Int8MoEMethod):
    """The experts of a layer: vLLM's weights and kernel around them, our experts in it."""

    def __init__(self, moe: FusedMoEConfig, scheme: dict[str, Any]) -> None:
        CompressedTensorsMoEMethod.__init__(self, moe)  # the parent's own looks for experts among vLLM's
        if refused := _refused(moe):
            raise ValueError(
                f"moe-int8 does not support {refused}; without it, or with VLLM_PLUGINS='' (no plugins), vLLM starts"
            )
        self.weight_quant, self.input_quant = scheme["weights"], scheme["input_activations"]
        self.static_input_scales = False
        self.int8_backend = Int8MoeBackend.TRITON  # the name under which vLLM leaves the weights as they are
        self.experts_cls = Int8Experts

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        if layer.apply_router_weight_on_input:
            raise ValueError("moe-int8 does not support apply_router_weight_on_input")
        super().process_weights_after_loading(layer)


class Int8Experts(mk.FusedMoEExpertsModular):
    """`fused_moe` in vLLM's modular kernel."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.accumulator = accumulator()

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return _on_our_device()

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return (weight_key, activation_key) == (kInt8StaticChannelSym, kInt8DynamicTokenSym)

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation == MoEActivation.SILU

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: FusedMoEParallelConfig) -> bool:
        return not moe_parallel_config.use_all2all_kernels or moe_parallel_config.all2all_backend in ALL2ALL

    @staticmethod
    def _supports_batch_invariance() -> bool:
        return accumulator() == "int32"

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceNoOP()  # the sum over a token's experts is part of `fused_moe`

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        activation: MoEActivation,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        return (0,), (0,), (M, K)

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Write the experts' weighted sum to output [M, H]; the routed scaling factor is in topk_weights."""
        fused_moe(
            hidden_states,
            w1,
            self.w1_scale,
            w2,
            self.w2_scale,
            topk_weights,
            topk_ids,
            expert_map=expert_map,
            accumulator=self.accumulator,
            out=output,
        )


def _on_our_device() -> bool:
    return current_platform.is_cpu() or (current_platform.is_cuda() and current_platform.has_device_capability(80))


def _dense_is_ours() -> bool:
    return _on_our_device() and (current_platform.is_cpu() or os.environ.get("MOE_INT8_VLLM_DENSE") == "1")


def _is_channel_int8(scheme: dict[str, Any] | None) -> bool:
    if scheme is None or scheme.get("output_activations") is not None:
        return False
    return all(
        isinstance(scheme[name], QuantizationArgs)
        and all(getattr(scheme[name], key) == value for key, value in expected.items())
        for name, expected in (("weights", CHANNEL_INT8), ("input_activations", TOKEN_INT8))
    )


def _refused(moe: FusedMoEConfig) -> str | None:
    """What of this deployment our experts cannot do, in the user's words."""
    parallel = moe.moe_parallel_config
    if not Int8Experts._supports_parallel_config(parallel):
        return f"--all2all-backend {parallel.all2all_backend}, only {' and '.join(ALL2ALL)}"
    for refused, what in (
        (moe.is_lora_enabled, "LoRA (--enable-lora)"),
        (parallel.enable_eplb, "EPLB (--enable-eplb)"),
        (moe.activation != MoEActivation.SILU, f"the activation {moe.activation.value}, only silu"),
        (moe.swiglu_limit is not None, "swiglu_limit"),
        (moe.has_bias, "experts with a bias"),
    ):
        if refused:
            return what
    return None


def _announce() -> None:
    """Say once in each process what is ours, and tell vLLM's compile cache, which must not mix settings up."""
    dense = "moe-int8" if _dense_is_ours() else "vLLM"
    logger.info_once("moe-int8 is active: INT8 experts by moe-int8, dense by %s, accumulator %s", dense, accumulator())
    config = get_current_vllm_config()
    if isinstance(config.additional_config, dict):
        config.additional_config["moe_int8"] = {"dense": dense, "accumulator": accumulator()}
    if current_platform.is_cpu() and not config.model_config.enforce_eager:
        # Its oneDNN product does not declare that it writes its output, so the compiler puts the top-k before it.
        logger.warning_once("add --enforce-eager: compiled for a CPU, vLLM 0.32 may route before it has the logits")


def _check_interface() -> None:
    """Raise TypeError if vLLM would call our experts with other methods or arguments than we know."""
    if Int8Experts.__abstractmethods__:
        raise TypeError(f"vLLM's experts also need {', '.join(sorted(Int8Experts.__abstractmethods__))}")
    for name in ("apply", "workspace_shapes"):
        theirs = list(inspect.signature(getattr(mk.FusedMoEExpertsModular, name)).parameters)
        ours = list(inspect.signature(getattr(Int8Experts, name)).parameters)
        if theirs != ours:
            raise TypeError(f"vLLM's experts take {theirs} in {name}, not {ours}")
