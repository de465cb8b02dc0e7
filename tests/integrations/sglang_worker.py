"""Runs SGLang's own W8A8Int8MoEMethod with the plugin, in a process of its own; prints what went wrong, or "ok"."""

import sys
import types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec

import pytest
import torch


class TorchvisionStub(MetaPathFinder, Loader):
    """Finds every module of torchvision, all empty: SGLang imports it for pictures, and the one on PyPI does not fit a
    torch without CUDA."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "torchvision" else None

    def exec_module(self, module: types.ModuleType) -> None:
        def attribute(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

        module.__getattr__ = attribute


def main() -> None:
    from transformers import AutoProcessor  # noqa: F401 - while transformers sees that there is no torchvision

    sys.meta_path.append(TorchvisionStub())
    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
    from sglang.srt.layers.moe.topk import StandardTopKOutput
    from sglang.srt.layers.quantization.w8a8_int8 import W8A8Int8Config, W8A8Int8MoEMethod
    from sglang.srt.plugins import load_plugins

    from moe_int8 import fused_moe, quantize_per_channel

    load_plugins()
    M, H, N, E, topk = 5, 64, 32, 8, 3
    torch.manual_seed(0)
    method = W8A8Int8MoEMethod(W8A8Int8Config({}))
    layer = torch.nn.Module()
    method.create_weights(layer, E, H, N, torch.bfloat16)
    for name, weight in (("w13", torch.randn(E, 2 * N, H)), ("w2", torch.randn(E, H, N))):
        codes, scale = quantize_per_channel(weight)
        getattr(layer, f"{name}_weight").data.copy_(codes)
        getattr(layer, f"{name}_weight_scale").data.copy_(scale)
    method.process_weights_after_loading(layer)

    topk_ids = torch.stack([torch.randperm(E)[:topk] for _ in range(M)]).int()
    topk_ids[1, 2] = -1  # an expert of another rank
    topk_output = StandardTopKOutput(torch.rand(M, topk), topk_ids, torch.zeros(M, E))
    for inplace in (True, False):
        for factor in (None, 2.5):
            method.create_moe_runner(layer, MoeRunnerConfig(inplace=inplace, routed_scaling_factor=factor))
            assert method.runner.runner_backend.value == "moe_int8", method.runner.runner_backend
            assert method.runner.fused_func is None
            x = torch.randn(M, H, dtype=torch.bfloat16)
            expected = fused_moe(
                x,
                layer.w13_weight,
                layer.w13_weight_scale,
                layer.w2_weight,
                layer.w2_weight_scale,
                topk_output.topk_weights,
                topk_ids,
                routed_scaling_factor=factor or 1.0,
            )
            before = x.clone()
            out = method.apply(layer, StandardDispatchOutput(x, None, topk_output)).hidden_states
            assert torch.equal(out, expected)
            assert (out.data_ptr() == x.data_ptr()) == inplace
            assert inplace or torch.equal(x, before)

    for refused in ({"no_combine": True}, {"activation": "gelu"}, {"apply_router_weight_on_input": True}):
        with pytest.raises(ValueError, match=next(iter(refused))):
            method.create_moe_runner(layer, MoeRunnerConfig(**refused))
    print("ok")


if __name__ == "__main__":
    main()
