"""InternVL and Intern-S1 of Shanghai AI Laboratory: pictures around text models of others. Imports
no torch.
"""

from __future__ import annotations

from dataclasses import replace

from freight.model.config.families.qwen import QWEN2
from freight.model.config.family import LANGUAGE_MODEL, words
from freight.model.config.tensor_names import VISION_TOWER, TensorNames, not_run

_INTERN_KEYS = words(
    "vision_config image_token_id image_seq_length downsample_ratio projector_hidden_act "
    "vision_feature_layer vision_feature_select_strategy"
)
# keys of InternVL's code; `hidden_size` repeats that of the text model
_CHAT_KEYS = words(
    "vision_config downsample_ratio dynamic_image_size force_image_size hidden_size "
    "image_fold max_dynamic_patch min_dynamic_patch pad2square ps_version select_layer "
    "system_message template use_thumbnail"
)
# keys of unmerged adapters; if a checkpoint has their tensors, their names are refused
_ADAPTERS = words("use_backbone_lora use_llm_lora")
_INTERNVL = replace(
    QWEN2,
    architecture="InternVLForConditionalGeneration",
    bodies=LANGUAGE_MODEL,
    text_type="qwen2",
    other_texts=("qwen3", "qwen3_moe", "llama"),
    wrapper_keys=_INTERN_KEYS,
    tensors=TensorNames(unused=VISION_TOWER),
)

ROWS = {
    "internvl": _INTERNVL,
    "interns1": replace(_INTERNVL, architecture="InternS1ForConditionalGeneration"),
    "internvl_chat": replace(
        _INTERNVL,
        architecture="InternVLChatModel",
        bodies=LANGUAGE_MODEL[1:],
        text_key="llm_config",
        wrapper_keys=_CHAT_KEYS | _ADAPTERS,
        tensors=TensorNames(unused=not_run("vision", "vision_model.*", "mlp1.*")),
    ),
}
