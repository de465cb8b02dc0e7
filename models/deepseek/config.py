"""What config.json says of a DeepSeek V2 or V3 model, checked and frozen."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_int8.models.deepseek.untrusted import read_json, shown
from moe_int8.routing import check_routing

ARCHITECTURES = ("DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM")
MAX_SIZE = 2**31 - 1  # of any one number; a larger one in config.json is a mistake or an attack
MIN_ROTATIONS = 1e-3  # of YaRN's beta; a smaller one overflows the search for the pair that turns so often


class ConfigError(ValueError):
    """config.json is missing, broken or describes a model that is not supported."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding; `factor` 1 means no YaRN.

    Attributes:
        theta: base of the frequencies.
        factor: how many times the context grew over `original_max_position_embeddings`.
        beta_fast, beta_slow: rotations over the original context between which frequencies are blended.
        mscale, mscale_all_dim: temperature of the attention; `mscale_all_dim` enters the softmax scale, the ratio of
            both the rotated part.
    """

    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "RopeConfig":
        """Read the old spelling (`rope_theta` and `rope_scaling` with `type`) or the new (`rope_parameters` with
        `rope_type`)."""
        scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not isinstance(scaling, Mapping):
            raise ConfigError(f"config.json: rope_parameters (or rope_scaling) must be an object, got {shown(scaling)}")
        theta = scaling.get("rope_theta", config.get("rope_theta"))
        rope: dict[str, Any] = {"theta": number("rope_theta", 10000.0 if theta is None else theta, above=1)}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind == "default":
            return cls(**rope)
        if kind != "yarn":
            raise ConfigError(f"config.json: rope type {shown(kind)} is not supported, only 'yarn' and 'default'")
        for name in ("factor", "original_max_position_embeddings"):
            if scaling.get(name) is None:
                raise ConfigError(f"config.json: yarn needs {name}")
        rope["original_max_position_embeddings"] = integer(
            "original_max_position_embeddings", scaling["original_max_position_embeddings"]
        )
        for name, above in (("factor", 0), ("beta_fast", MIN_ROTATIONS), ("beta_slow", MIN_ROTATIONS)):
            if scaling.get(name) is not None:
                rope[name] = number(name, scaling[name], above=above)
        for name in ("mscale", "mscale_all_dim"):
            if scaling.get(name) is not None:
                rope[name] = number(name, scaling[name])
                if rope[name] < 0:
                    raise ConfigError(f"config.json: {name} must not be negative, got {rope[name]}")
        return cls(**rope)


@dataclass(frozen=True)
class DeepseekConfig:
    """The names are those of config.json. `q_lora_rank` None: the query has one projection (V2-Lite);
    `n_routed_experts` 0: every layer is dense."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    first_k_dense_replace: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    scoring_func: str
    topk_method: str
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    num_nextn_predict_layers: int
    rope: RopeConfig

    @classmethod
    def from_folder(cls, folder: Path | str) -> "DeepseekConfig":
        """Read `folder`/config.json.

        Raises:
            ConfigError: there is none, or it does not describe a model that is supported.
        """
        return cls.from_dict(read_config(folder))

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "DeepseekConfig":
        """Check the content of a config.json.

        Raises:
            ConfigError: names the field and its value.
        """
        architecture = supported_architecture(config)
        v3 = architecture == "DeepseekV3ForCausalLM"

        def size(name: str, default: int | None = None, least: int = 1) -> int:
            value = config.get(name)
            if value is None:
                value = default
            if value is None:
                raise ConfigError(f"config.json lacks {name}")
            return integer(name, value, least)

        num_layers = size("num_hidden_layers")
        n_routed_experts = size("n_routed_experts", 0, least=0)
        moe = n_routed_experts > 0
        q_lora_rank = config.get("q_lora_rank")
        topk_method = config.get("topk_method", "noaux_tc" if v3 else "greedy")
        made = cls(
            architecture=architecture,
            vocab_size=size("vocab_size"),
            hidden_size=size("hidden_size"),
            intermediate_size=size("intermediate_size"),
            moe_intermediate_size=size("moe_intermediate_size") if moe else 0,
            num_hidden_layers=num_layers,
            num_attention_heads=size("num_attention_heads"),
            first_k_dense_replace=min(size("first_k_dense_replace", 0, least=0), num_layers) if moe else num_layers,
            n_routed_experts=n_routed_experts,
            n_shared_experts=size("n_shared_experts", 0, least=0),
            num_experts_per_tok=size("num_experts_per_tok") if moe else 0,
            n_group=1 if topk_method == "greedy" else size("n_group", 1),
            topk_group=1 if topk_method == "greedy" else size("topk_group", 1),
            norm_topk_prob=boolean("norm_topk_prob", config.get("norm_topk_prob", v3)),
            routed_scaling_factor=number("routed_scaling_factor", config.get("routed_scaling_factor", 1.0)),
            scoring_func=config.get("scoring_func", "sigmoid" if v3 else "softmax"),
            topk_method=topk_method,
            q_lora_rank=None if q_lora_rank is None else integer("q_lora_rank", q_lora_rank),
            kv_lora_rank=size("kv_lora_rank"),
            qk_nope_head_dim=size("qk_nope_head_dim"),
            qk_rope_head_dim=size("qk_rope_head_dim"),
            v_head_dim=size("v_head_dim"),
            rms_norm_eps=number("rms_norm_eps", config.get("rms_norm_eps", 1e-6), above=0),
            max_position_embeddings=size("max_position_embeddings"),
            num_nextn_predict_layers=size("num_nextn_predict_layers", 0, least=0),
            rope=RopeConfig.from_dict(config),
        )
        made._check(config)
        return made

    def _check(self, config: Mapping[str, Any]) -> None:
        for name, supported in (
            ("hidden_act", "silu"),
            ("attention_bias", False),
            ("mlp_bias", False),
            ("tie_word_embeddings", False),
            ("moe_layer_freq", 1),
            ("rope_interleave", True),
        ):
            value = config.get(name, supported)
            if value is not None and value != supported:
                raise ConfigError(f"config.json: {name} = {shown(value)} is not supported, only {supported!r}")
        if self.qk_rope_head_dim % 2:
            raise ConfigError(f"config.json: qk_rope_head_dim = {self.qk_rope_head_dim} must be even")
        if not self.n_routed_experts:
            return
        known = (("noaux_tc", "sigmoid"), ("greedy", "softmax"), ("group_limited_greedy", "softmax"))
        if (self.topk_method, self.scoring_func) not in known:
            raise ConfigError(
                f"config.json: topk_method {shown(self.topk_method)} with scoring_func {shown(self.scoring_func)} is "
                f"not supported; known pairs: {', '.join(f'{m} with {s}' for m, s in known)}"
            )
        try:
            check_routing(
                self.n_routed_experts,
                top_k=self.num_experts_per_tok,
                n_group=self.n_group,
                topk_group=self.topk_group,
                scoring=self.scoring_func,
                group_score=self.group_score,
            )
        except ValueError as error:
            raise ConfigError(f"config.json: {error}") from error

    def is_moe(self, layer: int) -> bool:
        """Whether decoder layer number `layer` has experts."""
        return layer >= self.first_k_dense_replace

    @property
    def group_score(self) -> str:
        """How the router scores a group of experts, as `grouped_topk` calls it."""
        return "top2_sum" if self.topk_method == "noaux_tc" else "max"

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Values that the cache holds for a token and layer: the latent and the rotary part of the key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """qk_head_dim^-0.5, times YaRN's temperature squared (DeepSeek-V2's technical report and released code)."""
        return self.qk_head_dim**-0.5 * yarn_mscale(self.rope.factor, self.rope.mscale_all_dim) ** 2

    def sharded_dimensions(self) -> dict[str, int]:
        """The dimensions that tensor parallelism splits and that cannot be padded."""
        sharded = {"num_attention_heads": self.num_attention_heads}
        if self.first_k_dense_replace > 0:
            sharded["intermediate_size"] = self.intermediate_size
        if self.n_routed_experts:
            sharded["moe_intermediate_size"] = self.moe_intermediate_size
        return sharded


def yarn_mscale(factor: float, mscale: float) -> float:
    """0.1 * mscale * ln(factor) + 1 for factor > 1 (YaRN, equation 22 with DeepSeek's mscale)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def read_config(folder: Path | str) -> dict[str, Any]:
    """The content of `folder`/config.json.

    Raises:
        ConfigError: the folder or the file is missing, or the file is not a JSON object.
    """
    path = Path(folder) / "config.json"
    if not Path(folder).is_dir():
        raise ConfigError(f"{folder} is not a folder; give the folder of a DeepSeek checkpoint")
    if not path.is_file():
        raise ConfigError(f"{folder} has no config.json; give the folder of a DeepSeek checkpoint")
    try:
        return read_json(path)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def supported_architecture(config: Mapping[str, Any]) -> str:
    """The model's architecture.

    Raises:
        ConfigError: it is not one of ARCHITECTURES; DeepSeek V3.2 is refused by its own name.
    """
    names = config.get("architectures") or []
    name = names[0] if isinstance(names, list) and names else None
    if name in ARCHITECTURES:
        return str(name)
    if name == "DeepseekV32ForCausalLM":
        raise ConfigError("DeepseekV32ForCausalLM (DeepSeek V3.2, sparse attention) is not supported")
    raise ConfigError(f"config.json: architecture {shown(name)} is not supported, only {' and '.join(ARCHITECTURES)}")


def integer(name: str, value: Any, least: int = 1) -> int:
    """`value` if it is a whole number from `least` to MAX_SIZE, else ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_SIZE:
        raise ConfigError(f"config.json: {name} must be a whole number from {least} to {MAX_SIZE}, got {shown(value)}")
    return value


def number(name: str, value: Any, above: float = -MAX_SIZE) -> float:
    """`value` as a float greater than `above`, up to MAX_SIZE, else ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not above < value <= MAX_SIZE:
        raise ConfigError(
            f"config.json: {name} must be a number above {above} and up to {MAX_SIZE}, got {shown(value)}"
        )
    return float(value)


def boolean(name: str, value: Any) -> bool:
    """`value` if it is true or false, else ConfigError."""
    if not isinstance(value, bool):
        raise ConfigError(f"config.json: {name} must be true or false, got {shown(value)}")
    return value
