"""The tiny models: real vLLM model classes, a few layers small, with no weights on disk.

A model is one entry of ``MODELS``: its Hugging Face config and the engine settings it needs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCABULARY = 1024
CONTEXT_TOKENS = 8192

Value = (
    str | int | float | bool | None | list[str] | list[int] | list[float]
    | Mapping[str, float | bool | str]
)  # fmt: skip


DRAFTS = 2  # tokens that a drafter proposes per step
_DRAFTER_FOLDER = "drafter"


@dataclass(frozen=True, slots=True)
class Drafter:
    """A draft model: vLLM's name of the method, and its config.json."""

    method: str
    config: Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class TinyModel:
    """One model: what it stands for, its config.json, and overrides of vLLM's EngineArgs.

    ``by_bytes``: its output depends on how a prompt is cut into steps, with or without a cache,
    so what two engines hold of a prompt is compared as bytes instead. With a ``drafter``, its
    proposals are compared too: the output is the same whatever they are.
    """

    about: str
    config: Mapping[str, Value]
    engine: Mapping[str, Value] = field(default_factory=dict)
    by_bytes: bool = False
    drafter: Drafter | None = None


def _decoder(architecture: str, model_type: str, **own: Value) -> dict[str, Value]:
    """Return the config of a small decoder: 4 layers, 2 KV heads of 32, float32."""
    common: dict[str, Value] = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": VOCABULARY,
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,  # the CPU attention kernel has no 16
        "max_position_embeddings": CONTEXT_TOKENS,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return common | own


WINDOW_TOKENS = 128  # of sliding windows: one block of the CPU backend
CHUNK_TOKENS = 256


# The CPU's scan returns no states from inside a step, which vLLM asks for when a prompt's last step
# is longer than a block: no step is.
_MAMBA2_ENGINE: Mapping[str, Value] = {"max_num_batched_tokens": 128}
_MAMBA: Mapping[str, Value] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 64,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}


def _layers(pattern: str) -> list[str]:
    """Return a config's layer_types: "s" sliding, "c" chunked local, "f" full attention."""
    names = {"s": "sliding_attention", "c": "chunked_attention", "f": "full_attention"}
    return [names[letter] for letter in pattern]


_LLAMA = _decoder("LlamaForCausalLM", "llama")
_GPTOSS = _decoder(
    "GptOssForCausalLM",
    "gpt_oss",
    head_dim=64,
    attention_bias=True,
    sliding_window=WINDOW_TOKENS,
    layer_types=_layers("sfsf"),
    num_local_experts=4,
    num_experts_per_tok=2,
    rope_theta=150000.0,
    rope_scaling={
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
)

MODELS: Mapping[str, TinyModel] = {
    "llama": TinyModel(about="one group of full attention", config=_LLAMA),
    "llama_eagle": TinyModel(
        about="one group of full attention, a drafter's layer in it",
        config=_LLAMA,
        drafter=Drafter("eagle", _LLAMA | {"num_hidden_layers": 1}),
    ),
    "qwen3": TinyModel(
        about="one group of full attention, normalised queries and keys",
        config=_decoder("Qwen3ForCausalLM", "qwen3"),
    ),
    "mistral_swa": TinyModel(
        about="one group of sliding windows, no full attention at all",
        config=_decoder("MistralForCausalLM", "mistral", sliding_window=WINDOW_TOKENS),
    ),
    "gptoss": TinyModel(about="sliding windows and full attention, layer by layer", config=_GPTOSS),
    "gptoss_eagle": TinyModel(
        about="sliding windows and full attention, a drafter's layer in a group of its own",
        config=_GPTOSS,
        drafter=Drafter(
            "eagle3",
            _LLAMA
            | {
                "num_hidden_layers": 1,
                "head_dim": 64,
                "target_hidden_size": 64,
                "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
            },
        ),
    ),
    "llama4": TinyModel(
        about="three groups of chunked local attention and one of full attention",
        config=_decoder(
            "Llama4ForCausalLM",
            "llama4_text",
            attention_chunk_size=CHUNK_TOKENS,
            layer_types=_layers("cccf"),
            no_rope_layers=[1, 1, 1, 0],
            num_local_experts=4,
            num_experts_per_tok=1,
            moe_layers=[0, 1, 2, 3],
            interleave_moe_layer_step=1,
            intermediate_size_mlp=128,
            use_qk_norm=True,
            attn_temperature_tuning=False,
            for_llm_compressor=False,
            rope_theta=500000.0,
        ),
    ),
    "gemma4": TinyModel(
        about="sliding windows and full attention with different block sizes",
        config=_decoder(
            "Gemma4ForCausalLM",
            "gemma4_text",
            num_hidden_layers=8,
            layer_types=_layers("ssfssfsf"),
            sliding_window=WINDOW_TOKENS,
            global_head_dim=64,
            hidden_activation="gelu_pytorch_tanh",
            num_kv_shared_layers=2,  # which read the KV of the last two before
            hidden_size_per_layer_input=0,
            vocab_size_per_layer_input=VOCABULARY,
            tie_word_embeddings=True,
        ),
    ),
    "deepseek_v3": TinyModel(
        about="one group of MLA, latent vectors in blocks of 16 tokens",
        config=_decoder(
            "DeepseekV3ForCausalLM",
            "deepseek_v3",
            num_hidden_layers=3,
            num_key_value_heads=4,
            kv_lora_rank=512,
            q_lora_rank=64,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            first_k_dense_replace=1,
            moe_layer_freq=1,
            n_group=1,
            topk_group=1,
            topk_method="noaux_tc",
            scoring_func="sigmoid",
            norm_topk_prob=True,
            routed_scaling_factor=1.0,
            num_nextn_predict_layers=0,
        ),
        by_bytes=True,
    ),
    "nemotronh": TinyModel(
        about="Mamba 2 states and full attention",
        config=_decoder(
            "NemotronHForCausalLM",
            "nemotron_h",
            num_hidden_layers=6,
            hybrid_override_pattern="M-M*M-",
            layers_block_type=["mamba", "mlp", "mamba", "attention", "mamba", "mlp"],
            mamba_num_heads=8,
            mamba_head_dim=16,
            ssm_state_size=16,
            conv_kernel=4,
            n_groups=1,
            chunk_size=64,
            expand=2,
            use_conv_bias=True,
            use_bias=False,
            mlp_bias=False,
            attention_bias=False,
            mlp_hidden_act="relu2",
            layer_norm_epsilon=1e-5,
            mamba_hidden_act="silu",
            mamba_proj_bias=False,
            residual_in_fp32=False,
        ),
        engine=_MAMBA2_ENGINE,
    ),
    "falconh1": TinyModel(
        about="Mamba 2 states and full attention side by side in every layer",
        config=_decoder(
            "FalconH1ForCausalLM",
            "falcon_h1",
            num_hidden_layers=3,
            mamba_d_ssm=128,
            mamba_rms_norm=False,
            mamba_norm_before_gate=True,
            ssm_multipliers=[1.0] * 5,
            mlp_multipliers=[1.0, 1.0],
            key_multiplier=1.0,
            attention_in_multiplier=1.0,
            attention_out_multiplier=1.0,
            ssm_in_multiplier=1.0,
            ssm_out_multiplier=1.0,
            embedding_multiplier=1.0,
            lm_head_multiplier=1.0,
            **{**_MAMBA, "mamba_d_head": 16},
        ),
        engine=_MAMBA2_ENGINE,
    ),
    "granitehybrid": TinyModel(
        about="Mamba 2 states and full attention, with experts",
        config=_decoder(
            "GraniteMoeHybridForCausalLM",
            "granitemoehybrid",
            hidden_size=128,
            layer_types=["mamba", "attention", "mamba", "attention"],
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=128,
            position_embedding_type="rope",
            embedding_multiplier=1.0,
            residual_multiplier=1.0,
            attention_multiplier=0.18,
            logits_scaling=1.0,
            **_MAMBA,
        ),
        engine=_MAMBA2_ENGINE,
    ),
    "lfm2": TinyModel(
        about="short convolutions and full attention",
        config=_decoder(
            "Lfm2ForCausalLM",
            "lfm2",
            hidden_size=128,
            layer_types=["conv", "full_attention", "conv", "full_attention"],
            conv_L_cache=96,  # states of the usual 3 reach two tokens, which few outputs show
            conv_bias=False,
            conv_dim=128,
            block_dim=128,
            block_ff_dim=256,
            block_multiple_of=16,
            block_ffn_dim_multiplier=1.0,
            block_auto_adjust_ff_dim=False,
            norm_eps=1e-5,
        ),
    ),
    "qwen3next": TinyModel(
        about="gated delta nets and full attention, with experts; bfloat16",
        config=_decoder(
            "Qwen3NextForCausalLM",
            "qwen3_next",
            torch_dtype="bfloat16",
            linear_conv_kernel_dim=4,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            layer_types=["linear_attention"] * 3 + ["full_attention"],
            full_attention_interval=4,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            partial_rotary_factor=0.25,
            mlp_only_layers=[],
        ),
        engine={"dtype": "bfloat16"},
    ),
}
DEFAULT_MODEL = "llama"


def write_model(name: str, folder: Path) -> Path:
    """Write the model's config.json under ``folder/name`` and return that directory.

    A drafter's lies in a folder inside it. Raises KeyError, naming the known models, when there
    is no such model.
    """
    if name not in MODELS:
        raise KeyError(f"no tiny model {name!r}; there are: {', '.join(MODELS)}")
    model, directory = MODELS[name], folder / name
    _write_config(directory, model.config)
    if model.drafter is not None:
        _write_config(directory / _DRAFTER_FOLDER, model.drafter.config)
    return directory


def engine_settings(name: str, directory: Path) -> dict[str, Any]:
    """Return the overrides of EngineArgs that a model written to ``directory`` needs."""
    model = MODELS[name]
    settings: dict[str, Any] = dict(model.engine)
    if model.drafter is not None:
        settings["speculative_config"] = {
            "method": model.drafter.method,
            "model": str(directory / _DRAFTER_FOLDER),
            "num_speculative_tokens": DRAFTS,
        }
    return settings


def _write_config(directory: Path, config: Mapping[str, Value]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(config), indent=1, sort_keys=True))
