"""Write src/freight/model/config/computing_keys.txt: the config.json keys that change the computation.

    python tools/config_keys.py            prints the file
    python tools/config_keys.py --write    writes it

A key computes if the modeling code of a causal language model in transformers reads it from its
configuration (`config.KEY` in modeling_*.py, where configuration_*.py declares KEY). Initial
values, dropout, losses and the parts for sound and pictures do not count. `ELSEWHERE` has keys that
only other code reads: code that comes with checkpoints, and models that vLLM or SGLang has and
transformers has not.

Freight refuses a key of the list that it does not implement, and ignores every other key
(`model/config/keys.py`).
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path

from freight.model.config.family import words

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "src/freight/model/config/computing_keys.txt"

# Words in a name that mark a key of training, of a classifier, or of another part than the language
# model
_OTHER = words(
    """
    dropout pdrop layerdrop jitter loss coef init initializer checkpointing classifier summary prob probs time
    audio video vision image images patch patching mel chroma codebook adapter adaptor encoder cross mask lang
    pronunciation chunks lsh axial nemo conf sscp ple prompt shape task asm byte codec altup laurel
    """
)
# Candidates that hold no number of the model: places in a file, seeds, methods of a class
_NO_NUMBER = words(
    """
    decoder seed mode languages context_length max_seq_len n_ctx n_positions max_inference_chunksize segment_types
    use_mamba_kernels use_mambapy use_associative_scan causal is_encoder pad_index eos_index mask_token_id
    vocabulary_map attention_softmax_in_fp32 scale_attention_softmax_in_fp32 reorder_and_upcast_attn
    slow_but_exact pretraining_tp enable_moe_fp32_combine residual_in_fp32 autocast_kernel_dtype inference_state_dtype
    image_token_id num_logits_to_keep chunk_size_lm_head max_source_positions max_target_positions
    """
)
_LIBRARY = words("to_dict update validate get_text_config gradient_checkpointing")

ELSEWHERE = {
    "ChatGLM": words(
        """
        add_bias_linear add_qkv_bias apply_query_key_layer_scaling interleaved_qkv kv_channels
        multi_query_attention multi_query_group_num original_rope post_layer_norm rmsnorm rope_ratio
        """
    ),
    "DeciLM": words("block_configs num_key_value_heads_per_layer"),
    "DeepSeek": words(
        "compress_ratios compress_rope_theta index_topk_freq num_hash_layers scale_fmt topk_method"
    ),
    "Grok": words(
        "attn_output_multiplier embedding_multiplier_scale output_multiplier_scale residual_moe"
    ),
    "InternLM": words("bias rotary"),
    "Laguna": words("moe_apply_router_weight_on_input"),
    "Kimi": words(
        """
        attn_res_block_size latent_moe_use_norm linear_attn_config mla_use_nope mla_use_output_gate
        moe_renormalize
        """
    ),
    "MiMo": words(
        """
        add_full_attention_sink_bias add_swa_attention_sink_bias attention_value_scale hybrid_layer_pattern
        swa_head_dim swa_num_attention_heads swa_num_key_value_heads swa_rope_theta swa_v_head_dim
        """
    ),
    "MiniCPM": words("dim_model_base mup_denominator scale_depth scale_emb sparse_config"),
    "MiniMax": words(
        """
        attention_output_gate attn_type_list layernorm_full_attention_alpha layernorm_full_attention_beta
        layernorm_linear_attention_alpha layernorm_linear_attention_beta layernorm_mlp_alpha layernorm_mlp_beta
        postnorm qk_norm_type sparse_attention_config use_gemma_norm
        """
    ),
    "MPT": words("attn_config no_bias"),
    "Qwen": words("dual_chunk_attention_config logn_list use_dynamic_ntk use_logn_attn"),
    "Step": words(
        """
        attention_other_setting moe_layers_enum partial_rotary_factors share_expert_dim swiglu_limits
        swiglu_limits_shared use_head_wise_attn_gate yarn_only_types zero_centered
        """
    ),
}


def read_names(tree: ast.AST) -> Iterator[str]:
    """Yield the X of `config.X`, `self.config.X`, `text_config.X` and `getattr(config, "X")`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_config(node.value):
            yield node.attr
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "hasattr")
        ):
            owner, *rest = node.args
            if _is_config(owner) and rest and isinstance(rest[0], ast.Constant):
                yield str(rest[0].value)


def _is_config(node: ast.expr) -> bool:
    return _name(node).endswith("config")


def _name(node: ast.expr) -> str:
    """Return `x` for x and for y.x."""
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


def declared_names(tree: ast.AST) -> Iterator[str]:
    """Yield the fields of configuration classes, and the names that their `attribute_map` has for
    them.
    """
    for cls in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for line in cls.body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                yield line.target.id
            if (
                isinstance(line, ast.Assign)
                and isinstance(line.value, ast.Dict)
                and _name(line.targets[0]) == "attribute_map"
            ):
                yield from (
                    str(key.value) for key in line.value.keys if isinstance(key, ast.Constant)
                )


def without_initial_values(tree: ast.Module) -> ast.Module:
    """Return `tree` without the functions that draw the weights of a new model."""
    for cls in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        cls.body = [
            line
            for line in cls.body
            if not (isinstance(line, ast.FunctionDef) and line.name == "_init_weights")
        ]
    return tree


def computing_keys(models: Path, causal: frozenset[str]) -> set[str]:
    """Return the keys that the folders in `causal` of transformers' `models` read in their modeling
    code.
    """
    results: set[str] = set()
    for folder in (models / name for name in causal):
        declared = {
            name
            for file in folder.glob("configuration_*.py")
            for name in declared_names(ast.parse(file.read_text()))
        }
        for file in folder.glob("modeling_*.py"):
            results |= declared & set(
                read_names(without_initial_values(ast.parse(file.read_text())))
            )
    elsewhere = {name for names in ELSEWHERE.values() for name in names}
    kept = {
        name for name in results if not _OTHER & set(name.split("_")) and not name.startswith("_")
    }
    return (kept | elsewhere) - _NO_NUMBER - _LIBRARY


def document() -> str:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    models = Path(transformers.__file__).parent / "models"
    causal = frozenset(name.replace("-", "_") for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    keys = sorted(computing_keys(models, causal))
    head = f"# tools/config_keys.py --write, from transformers {transformers.__version__}\n"
    return head + "".join(f"{key}\n" for key in keys)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Print the config.json keys that change the computation."
    )
    parser.add_argument(
        "--write", action="store_true", help=f"write {DATA.relative_to(ROOT)} instead"
    )
    if parser.parse_args().write:
        DATA.write_text(document(), encoding="utf-8")
    else:
        print(document(), end="")


if __name__ == "__main__":
    main()
