"""Values of options that other engines have: of the KV cache's format, and of quantization. Data;
imports no torch.
"""

from __future__ import annotations

# vLLM's names of caches that Freight has -> kv_cache_dtype and kv_scales
PER_TOKEN_HEAD = {
    "fp8_per_token_head": ("fp8", "dynamic"),
    "int8_per_token_head": ("int8", "dynamic"),
}

_FEWER_BITS = "a cache has 8 bits here: use 'fp8' or 'int8' (--kv-cache-dtype)"
_LATENTS = "a latent (MLA) has 8 bits with 'fp8', its scales per group of channels: use that"

OTHER_KV_CACHES = {  # values of `kv_cache_dtype` elsewhere
    # vLLM's
    **dict.fromkeys(
        (
            *("int4_per_token_head", "nvfp4", "nvfp4_4over6", "ultraquant_4bit"),
            *("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc"),
            *("octave_k3v4", "octave_k3v3", "octave_k3v3_compact"),
        ),
        _FEWER_BITS,
    ),
    "fp8_inc": "E4M3 of this device is 'fp8': use that",
    "fp8_ds_mla": _LATENTS,
    "nvfp4_ds_mla": _LATENTS,
    # SGLang's
    "mxfp8": "8 bits with a scale per token and head are 'fp8' with --kv-scales dynamic: use that",
    "bf16": "use 'bfloat16'",
    **dict.fromkeys(("fp4_mx_block16", "fp4_e2m1"), _FEWER_BITS),
    # llama.cpp's, of --cache-type-k
    "f32": "use 'float32'",
    "f16": "use 'float16'",
    "q8_0": "use 'int8', which has a scale per token and head, or 'fp8'",
    **dict.fromkeys(("q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"), _FEWER_BITS),
}

_DECLARED = "a checkpoint declares its own scheme, which is read without an option: omit it"

OTHER_QUANTIZATIONS = {  # values of `quantization` elsewhere
    **dict.fromkeys(
        (
            *("compressed-tensors", "modelopt", "quark", "fbgemm_fp8", "torchao", "awq", "gptq"),
            *(
                "gguf",
                "awq_marlin",
                "gptq_marlin",
                "auto_awq",
                "auto_gptq",
                "moe_wna16",
                "fp_quant",
            ),
            *("modelopt_fp8", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed", "petit_nvfp4"),
            *("mxfp4", "gpt_oss_mxfp4", "deepseek_v4_fp8", "w8a8_int8", "w8a8_fp8", "w4afp8"),
            *("auto-round", "auto-round-int8", "inc", "modelslim", "mxfp_w4a8"),
            *("quark_int4fp8_moe", "unquant"),
        ),
        _DECLARED,
    ),
    **dict.fromkeys(
        (
            *("marlin", "eetq", "exl2", "bitsandbytes", "bitsandbytes-nf4", "bitsandbytes-fp4"),
            *("online", "humming", "mxfp8", "nvfp4_per_token", "nvfp4_online", "quark_mxfp4"),
            "mlx_q4",
        ),
        "weights of 16 bits become FP8 or INT4 here: use 'fp8' or 'int4' with the unquantized checkpoint",
    ),
    **dict.fromkeys(
        ("fp8_per_channel", "fp8_per_tensor", "fp8_per_block"),
        "weights become FP8 with a scale for each output row: use 'fp8'",
    ),
    **dict.fromkeys(
        ("experts_int8", "int8_per_channel_weight_only", "mlx_q8"),
        "weights become INT8 with a scale for each output row, and their inputs too: use 'int8'",
    ),
}
