"""Sizes and constants of one model's attention, read from a Hugging Face config.json."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

INDEX_NORM_EPS = 1e-6
"""Epsilon of the index keys' LayerNorm: 1e-6 in every model, whatever ``rms_norm_eps`` says."""


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """The values of yarn's context extension (Peng et al., "YaRN", 2023)."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            lowest = 0 if name == "mscale_all_dim" else None
            _require(value > 0 or value == lowest, f"{name} of yarn must be > 0", value)

    def pair_range(self, theta: float, width: int) -> tuple[int, int]:
        """Return the pairs between which frequencies pass from kept to divided, rounded outwards.

        ``turn(b) = R * ln(original / (2 pi b)) / (2 ln theta)``; low = floor(turn(beta_fast)),
        high = ceil(turn(beta_slow)), both clamped to 0 … R-1.
        """

        def turn(beta: float) -> float:
            turns = self.original_max_position_embeddings / (2 * math.pi * beta)
            return width * math.log(turns) / (2 * math.log(theta))

        return max(math.floor(turn(self.beta_fast)), 0), min(math.ceil(turn(self.beta_slow)), width - 1)

    def attention_factor(self, mscale: float) -> float:
        """Return ``0.1 * mscale * ln(factor) + 1``, or 1 where nothing is stretched."""
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    @property
    def cos_sin_multiplier(self) -> float:
        """What cos and sin are multiplied by: the ratio of the two attention factors."""
        return self.attention_factor(self.mscale) / self.attention_factor(self.mscale_all_dim)


@dataclass(frozen=True, kw_only=True)
class SFAConfig:
    """Sizes, rope pairings and epsilons of one model; frozen and hashable. Letters are those of the README.

    Field names are those of config.json. What differs between models is a value here: nothing in this library
    asks for a model's name.
    """

    hidden_size: int  # D
    num_attention_heads: int  # H
    q_lora_rank: int  # Q
    kv_lora_rank: int  # L
    qk_nope_head_dim: int  # P
    qk_rope_head_dim: int  # R
    v_head_dim: int  # V
    index_n_heads: int  # J
    index_head_dim: int  # I
    index_topk: int  # K
    indexer_types: tuple[Literal["full", "shared"], ...]
    rope_theta: float
    yarn: Yarn | None = None
    rope_pairing: Literal["interleaved", "half"] = "interleaved"
    index_rope_pairing: Literal["interleaved", "half"] = "interleaved"
    latent_norm_eps: float = 1e-6
    index_norm_eps: float = INDEX_NORM_EPS
    max_position_embeddings: int = 163840

    def __post_init__(self) -> None:
        object.__setattr__(self, "indexer_types", tuple(self.indexer_types))  # a list would not hash
        for name, kind in type(self).__annotations__.items():
            value = getattr(self, name)
            if kind is int:
                _require(type(value) is int and value >= 1, f"{name} must be an integer >= 1", repr(value))
        for name in ("rope_pairing", "index_rope_pairing"):
            value = getattr(self, name)
            _require(value in ("interleaved", "half"), f"{name} must be 'interleaved' or 'half'", repr(value))
        for name in ("latent_norm_eps", "index_norm_eps", "rope_theta"):
            _require(getattr(self, name) > 0, f"{name} must be > 0", getattr(self, name))
        _require(self.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim must be even", self.qk_rope_head_dim)
        _require(
            self.index_head_dim >= self.qk_rope_head_dim,
            "index_head_dim must be at least qk_rope_head_dim",
            (self.index_head_dim, self.qk_rope_head_dim),
        )
        _require(
            len(self.indexer_types) > 0 and set(self.indexer_types) <= {"full", "shared"},
            "indexer_types must list 'full' or 'shared' for at least one layer",
            self.indexer_types,
        )
        _require(
            self.indexer_types[0] == "full",
            "layer 0 must be 'full', it has no earlier layer to share a selection with",
            self.indexer_types[0],
        )

    @property
    def num_layers(self) -> int:
        """Number of layers, those of multi-token prediction not counted."""
        return len(self.indexer_types)

    @property
    def qk_head_dim(self) -> int:
        """Width of a head's query before absorption, P + R."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def key_width(self) -> int:
        """Width E = L + R on which absorbed queries and latent keys are compared."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """``(P + R)^-0.5``, times ``mscale(mscale_all_dim)²`` with yarn. Never (L + R)^-0.5."""
        factor = 1.0 if self.yarn is None else self.yarn.attention_factor(self.yarn.mscale_all_dim)
        return self.qk_head_dim**-0.5 * factor**2

    @property
    def index_weight_scale(self) -> float:
        """``J^-0.5 * I^-0.5``, the constant inside `index_weights`. Yarn does not enter."""
        return self.index_n_heads**-0.5 * self.index_head_dim**-0.5

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "SFAConfig":
        """Read a config.json of DeepSeek-V3.2 or GLM-5, and refuse what this library can't compute.

        Rope is read in both spellings (``rope_theta`` with ``rope_scaling``, or ``rope_parameters``). The indexer's
        pairing is ``indexer_rope_interleave`` if present, else half for ``deepseek_v32`` and interleaved for
        ``glm_moe_dsa``. Which layers own an indexer: ``indexer_types``, else ``index_topk_pattern`` ("F"/"S"), else
        layer i is full iff ``max(i - offset + 1, 0) % freq == 0``. ``head_dim`` carries no information.

        Args:
            config: the parsed dictionary.

        Returns:
            The config.

        Raises:
            ValueError: an unknown ``model_type``, a missing or unusable value, attention biases, heads that share
                keys, a rope other than plain or yarn, or a layer 0 without an indexer of its own.

        Source: config.json of deepseek-ai/DeepSeek-V3.2 and zai-org/GLM-5; Hugging Face transformers 5.24,
        configuration_glm_moe_dsa.py, for the schedule of shared indexers.
        """
        model_type = config.get("model_type")
        _require(
            model_type in ("deepseek_v32", "glm_moe_dsa"),
            "model_type must be 'deepseek_v32' or 'glm_moe_dsa'",
            repr(model_type),
        )
        _require(not config.get("attention_bias"), "attention_bias must be false", config.get("attention_bias"))
        heads = _integer(config, "num_attention_heads")
        kv_heads = config.get("num_key_value_heads", heads)
        _require(kv_heads in (heads, None), "num_key_value_heads must equal num_attention_heads", kv_heads)
        half = model_type == "deepseek_v32"
        theta, yarn = _rope(config)
        return cls(
            hidden_size=_integer(config, "hidden_size"),
            num_attention_heads=heads,
            q_lora_rank=_integer(config, "q_lora_rank"),
            kv_lora_rank=_integer(config, "kv_lora_rank"),
            qk_nope_head_dim=_integer(config, "qk_nope_head_dim"),
            qk_rope_head_dim=_integer(config, "qk_rope_head_dim"),
            v_head_dim=_integer(config, "v_head_dim"),
            index_n_heads=_integer(config, "index_n_heads"),
            index_head_dim=_integer(config, "index_head_dim"),
            index_topk=_integer(config, "index_topk"),
            indexer_types=_indexer_types(config),
            rope_theta=theta,
            yarn=yarn,
            rope_pairing=_pairing(config, "rope_interleave", default=True),
            index_rope_pairing=_pairing(config, "indexer_rope_interleave", default=not half),
            latent_norm_eps=_number(config, "rms_norm_eps"),
            max_position_embeddings=_integer(config, "max_position_embeddings"),
        )

    def to_hf(self) -> dict[str, Any]:
        """Return the attention's part of a config.json from which `from_hf` reads this config again.

        Raises:
            ValueError: another epsilon of the index keys' norm than 1e-6, which no model has and no key says.
        """
        _require(
            self.index_norm_eps == INDEX_NORM_EPS,
            f"config.json has no key for an index_norm_eps other than {INDEX_NORM_EPS}",
            self.index_norm_eps,
        )
        rope: dict[str, Any] = {"rope_theta": self.rope_theta, "rope_type": "default"}
        if self.yarn is not None:
            rope |= {"rope_type": "yarn"} | asdict(self.yarn)
        same = [name for name in self.__dataclass_fields__ if name not in _RENAMED]
        return {name: getattr(self, name) for name in same} | {
            "model_type": "deepseek_v32" if self.index_rope_pairing == "half" else "glm_moe_dsa",
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_attention_heads,
            "indexer_types": list(self.indexer_types),
            "rms_norm_eps": self.latent_norm_eps,
            "attention_bias": False,
            "rope_interleave": self.rope_pairing == "interleaved",
            "indexer_rope_interleave": self.index_rope_pairing == "interleaved",
            "rope_parameters": rope,
        }


_RENAMED = frozenset(
    {"indexer_types", "rope_theta", "yarn", "rope_pairing", "index_rope_pairing", "latent_norm_eps", "index_norm_eps"}
)
"""Fields that config.json spells in another way."""


def _require(ok: bool, rule: str, got: object) -> None:
    if not ok:
        raise ValueError(f"SFAConfig: {rule}; got {got}")


def _integer(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"SFAConfig: {name} must be an integer >= 1; got {value!r}")
    return value


def _number(config: Mapping[str, Any], name: str) -> float:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0 or not math.isfinite(value):
        raise ValueError(f"SFAConfig: {name} must be a number > 0; got {value!r}")
    return float(value)


def _pairing(config: Mapping[str, Any], name: str, *, default: bool) -> Literal["interleaved", "half"]:
    flag = default if config.get(name) is None else config[name]
    _require(isinstance(flag, bool), f"{name} must be true or false", repr(flag))
    return "interleaved" if flag else "half"


def _rope(config: Mapping[str, Any]) -> tuple[float, Yarn | None]:
    values: dict[str, Any] = {}
    for source in ("rope_parameters", "rope_scaling"):
        spelled = config.get(source) or {}
        _require(isinstance(spelled, Mapping), f"{source} must be an object", repr(spelled))
        _merge(values, {("rope_type" if name == "type" else name): value for name, value in spelled.items()}, source)
    _merge(values, {"rope_theta": config.get("rope_theta")}, "the top level")
    theta = _number(values, "rope_theta")
    partial = values.get("partial_rotary_factor", 1.0)
    _require(partial in (1, 1.0), "partial_rotary_factor must be 1: the rope width is qk_rope_head_dim", partial)
    kind = values.get("rope_type", "default")
    _require(kind in ("default", "yarn"), "rope type must be 'default' or 'yarn'", repr(kind))
    if kind == "default":
        return theta, None
    _require(
        values.get("attention_factor") is None,
        "attention_factor of yarn must be left out",
        values.get("attention_factor"),
    )
    _require(values.get("truncate") in (None, True), "truncate of yarn must be left out", values.get("truncate"))
    for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0), ("mscale", 1.0)):
        if values.get(name) is None:
            values[name] = default
    all_dim = values.get("mscale_all_dim")
    return theta, Yarn(
        factor=_number(values, "factor"),
        original_max_position_embeddings=_integer(values, "original_max_position_embeddings"),
        beta_fast=_number(values, "beta_fast"),
        beta_slow=_number(values, "beta_slow"),
        mscale=_number(values, "mscale"),
        mscale_all_dim=0.0 if all_dim in (None, 0) else _number(values, "mscale_all_dim"),
    )


def _merge(values: dict[str, Any], other: Mapping[str, Any], source: str) -> None:
    """Add what another spelling says; two that contradict each other are refused rather than one ignored."""
    for name, value in other.items():
        if value is not None and values.setdefault(name, value) != value:
            raise ValueError(
                f"SFAConfig: {name} must be the same wherever it is given; got {values[name]} and {value} at {source}"
            )


def _indexer_types(config: Mapping[str, Any]) -> tuple[Literal["full", "shared"], ...]:
    count = _integer(config, "num_hidden_layers")
    listed, pattern = config.get("indexer_types"), config.get("index_topk_pattern")
    if listed is None and pattern is not None:
        _require(isinstance(pattern, str | list), "index_topk_pattern must be a string of F and S", repr(pattern))
        listed = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in map(str, pattern)]
    if listed is None:
        freq = config.get("index_topk_freq") or 1
        offset = config.get("index_skip_topk_offset")
        _require(isinstance(freq, int) and freq >= 1, "index_topk_freq must be an integer >= 1", repr(freq))
        _require(
            freq == 1 or (isinstance(offset, int) and offset >= 0),
            "index_skip_topk_offset must be given (an integer >= 0) where index_topk_freq > 1",
            repr(offset),
        )
        listed = ["full" if max(i - (offset or 0) + 1, 0) % freq == 0 else "shared" for i in range(count)]
    names = isinstance(listed, list | tuple) and all(isinstance(name, str) for name in listed)
    _require(names, "indexer_types must be a list of 'full' and 'shared'", repr(listed))
    _require(len(listed) == count, f"indexer_types must name all {count} layers", f"{len(listed)} names")
    return tuple(listed)


DEEPSEEK_V32 = SFAConfig(
    hidden_size=7168,
    num_attention_heads=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    index_n_heads=64,
    index_head_dim=128,
    index_topk=2048,
    indexer_types=("full",) * 61,
    rope_theta=1e4,
    yarn=Yarn(factor=40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0),
    index_rope_pairing="half",
    latent_norm_eps=1e-6,
    max_position_embeddings=163840,
)
"""DeepSeek-V3.2 and V3.2-Exp."""

GLM_5 = SFAConfig(
    hidden_size=6144,
    num_attention_heads=64,
    q_lora_rank=2048,
    kv_lora_rank=512,
    qk_nope_head_dim=192,
    qk_rope_head_dim=64,
    v_head_dim=256,
    index_n_heads=32,
    index_head_dim=128,
    index_topk=2048,
    indexer_types=("full",) * 78,
    rope_theta=1e6,
    index_rope_pairing="interleaved",
    latent_norm_eps=1e-5,
    max_position_embeddings=202752,
)
"""GLM-5 and GLM-5.1."""

GLM_52 = replace(
    GLM_5,
    rope_theta=8e6,
    max_position_embeddings=1048576,
    indexer_types=tuple("full" if i in (0, 1, 2, *range(6, 78, 4)) else "shared" for i in range(78)),
)
"""GLM-5.2 and GLM-5.3: 21 layers select, the others share."""

TINY = SFAConfig(
    hidden_size=64,
    num_attention_heads=4,
    q_lora_rank=32,
    kv_lora_rank=24,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=20,
    index_n_heads=16,
    index_head_dim=16,
    index_topk=4,
    indexer_types=("full", "full"),
    rope_theta=1e4,
    index_rope_pairing="half",
    max_position_embeddings=4096,
)
"""Sizes for examples and tests: all dims differ where the maths lets them, and 16 index heads make ties rare."""
