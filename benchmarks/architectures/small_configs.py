"""Configurations of transformers, made small: few layers, narrow, a short vocabulary.

A configuration class tells its fields, and what they are by default. Each field that decides about a size is given a
small value by its name, in nested configurations as well; all others stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

WIDTH, HEADS, HEAD_WIDTH, LAYERS, WORDS, POSITIONS, PIXELS, PATCH = 64, 4, 16, 4, 128, 128, 64, 8
FIRST_SPECIAL = 96  # the number of the first special token; texts are made of smaller ones

WIDTHS = (
    "hidden_size d_model n_embd dim embed_dim embedding_size hidden_dim encoder_hidden_size decoder_hidden_size "
    "text_hidden_size projection_dim out_hidden_size output_hidden_size word_embed_proj_dim d_embed emb_dim "
    "projector_hidden_size encoder_hidden_dim pooler_output_size classifier_proj_size codevector_dim "
    "cross_attention_dim proj_codevector_dim "
    "embedding_dim model_dim lru_width attention_hidden_size mask_feature_size feature_size_proj "
    "decoder_dim fpn_hidden_size vision_hidden_size image_embedding_size text_embed_dim multimodal_hidden_size "
    "qformer_hidden_size conformer_hidden_size encoder_embed_dim decoder_embed_dim input_dim output_dim rnn_hidden_size"
)
INNER_WIDTHS = (
    "intermediate_size encoder_ffn_dim decoder_ffn_dim d_ff ffn_dim mlp_dim n_inner moe_intermediate_size "
    "shared_expert_intermediate_size dim_feedforward ffn_hidden_size decoder_intermediate_size "
    "shared_intermediate_size dense_ffn_hidden_size expert_ffn_hidden_size d_inner intermediate_dim feed_forward_size "
    "dense_intermediate_size moe_shared_expert_intermediate_size expert_dim expert_intermediate_size "
    "prefix_dense_intermediate_size mlp_hidden_size feedforward_dim ffw_dim ff_dim encoder_intermediate_size"
)
HEAD_COUNTS = (
    "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads "
    "decoder_num_attention_heads encoder_num_attention_heads num_decoder_heads heads nhead num_mask_attention_heads "
    "conformer_num_attention_heads num_self_attention_heads num_cross_attention_heads"
)
HEAD_WIDTHS = (
    "head_dim d_kv attention_head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim dim_head attention_head_size "
    "global_head_dim swa_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim swa_v_head_dim "
    "kv_channels d_head head_size query_pre_attn_scalar mamba_d_head mamba_head_dim"
)
LAYER_COUNTS = "num_hidden_layers n_layer n_layers num_layers depth num_hidden_groups encoder_num_layers"
HALF_LAYER_COUNTS = (
    "encoder_layers decoder_layers num_decoder_layers num_encoder_layers decoder_num_hidden_layers resampler_depth "
    "encoder_num_hidden_layers num_text_layers num_image_layers text_layers image_layers l_layers x_layers r_layers "
    "conformer_num_layers num_nextn_predict_layers speech_encoder_layers text_encoder_layers num_cross_layers"
)
EXPERT_COUNTS = "num_experts n_routed_experts num_local_experts moe_num_experts num_moe_experts"
FIXED: dict[str, Any] = {
    "vocab_size": WORDS, "text_vocab_size": WORDS, "decoder_vocab_size": WORDS, "max_position_embeddings": POSITIONS,
    "n_positions": POSITIONS, "n_ctx": POSITIONS, "max_sequence_length": POSITIONS, "max_seq_len": POSITIONS,
    "max_target_positions": POSITIONS, "max_source_positions": POSITIONS, "context_length": POSITIONS,
    "max_encoder_position_embeddings": POSITIONS, "max_decoder_position_embeddings": POSITIONS,
    "num_experts_per_tok": 2, "moe_topk": 2, "moe_top_k": 2, "num_experts_per_token": 2, "top_k_experts": 2,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1, "moe_num_shared_experts": 1,
    "num_shared_experts": 1, "kv_lora_rank": 32, "q_lora_rank": 32, "index_head_dim": 32, "index_n_heads": 2,
    "index_topk": 16, "qk_head_dim": 2 * HEAD_WIDTH, "rotary_dim": HEAD_WIDTH, "linear_num_key_heads": 2,
    "linear_num_value_heads": HEADS, "linear_num_heads": HEADS, "mamba_n_heads": 8, "mamba_num_heads": 8,
    "mamba_d_state": 16, "mamba_d_ssm": 128, "mamba_n_groups": 1, "mamba_chunk_size": 16, "chunk_size": 16,
    "state_size": 16, "ssm_state_size": 16, "time_step_rank": 4, "mamba_dt_rank": 4, "sliding_window": 16,
    "attention_window": 16, "local_attention": 16, "block_size": 8, "window_size": 4, "num_queries": 16,
    "num_latents": 16, "d_latents": WIDTH, "image_size": PIXELS, "num_frames": 4, "max_length": POSITIONS,
    "entity_vocab_size": 32, "entity_emb_size": 32, "bottleneck_size": 32, "num_buckets": 8, "num_hash_buckets": 64,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": WORDS, "layers_per_block": 1, "codebook_size": 32,
    "num_codevectors_per_group": 16, "num_negatives": 4, "hidden_sizes_text": WIDTH, "tubelet_size": 2,
    "speech_decoder_prenet_units": 32, "postnet_units": 32, "num_query_tokens": 8, "encoder_stride": PATCH,
    "spatial_shapes": PIXELS, "pretrain_image_size": PIXELS, "stem_channels": 16, "num_codebooks": 2,
    "pretraining_tp": 1, "num_global_key_value_heads": 2, "v_dim": WIDTH,
}  # fmt: skip
PATCHES = (14, 16, 18, 32)
DEPTHS = ("depths", "num_blocks_per_stage", "num_blocks", "layer_depths", "encoder_depths")
WIDTH_LISTS = ("hidden_sizes", "embed_dims", "embed_dim", "neck_hidden_sizes", "hidden_dims", "out_channels",
               "encoder_hidden_sizes", "widths", "stage_dims", "dims")  # fmt: skip


def _values() -> dict[str, int]:
    named = {
        WIDTHS: WIDTH, INNER_WIDTHS: 2 * WIDTH, HEAD_COUNTS: HEADS, HEAD_WIDTHS: HEAD_WIDTH, LAYER_COUNTS: LAYERS,
        HALF_LAYER_COUNTS: LAYERS // 2, EXPERT_COUNTS: 4,
    }  # fmt: skip
    return {name: value for names, value in named.items() for name in names.split()} | FIXED


VALUES = _values()


def small(config_class: type, **chosen: Any) -> Any:
    """A small configuration of a class.

    Args:
        config_class: of transformers.
        chosen: fields that are given as they are.
    """
    fields = small_fields(config_class) | chosen
    return config_class(**fields)


def small_fields(config_class: Any) -> dict[str, Any]:
    """The fields of a class that make its configuration small."""
    usual = config_class()
    fields: dict[str, Any] = {}
    nested = {name: getattr(usual, name, None) for name in config_class.sub_configs}
    for name, part in nested.items():
        if part is not None and hasattr(part, "to_dict"):
            fields[name] = {**small_fields(type(part)), "model_type": part.model_type}
    for name, value in vars(usual).items():
        if name not in fields and not name.startswith("_"):
            changed = _small_value(name, value, usual)
            if changed != value:
                fields[name] = changed
    return fields | _special_tokens(usual, fields)


def _small_value(name: str, value: Any, usual: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, (list, tuple)):
        return type(value)(_small_list(name, value))
    if isinstance(value, dict):
        return {**value, "mrope_section": [2, 3, 3]} if "mrope_section" in value else value
    if not isinstance(value, int):
        return value
    if name == "embed_dim" and isinstance(heads := getattr(usual, "num_heads", None), (list, tuple)):
        return 8 * heads[0]
    if name == "patch_size" and value in PATCHES:
        return PATCH
    if name in ("num_key_value_heads", "n_head_kv", "num_kv_heads", "multi_query_group_num"):
        return HEADS if value == getattr(usual, "num_attention_heads", None) else min(2, value)
    return min(value, VALUES[name]) if name in VALUES else value


def _small_list(name: str, values: Sequence[Any]) -> list[Any]:
    if not values or not all(isinstance(each, int) and not isinstance(each, bool) for each in values):
        return list(values)
    if name in DEPTHS:
        return [min(each, 2) for each in values]
    if name == "image_size":
        return [PIXELS] * len(values)
    if name == "patch_size":
        return [PATCH if each in PATCHES else each for each in values]
    if name in ("conv_dim", "tdnn_dim"):
        return [32] * len(values)
    if name in WIDTH_LISTS:
        shares = (8, 6, 4, 3, 2, 1)
        share = next(each for each in shares if all(value % (8 * each) == 0 for value in values) or each == 1)
        return [value // share for value in values]
    return list(values)


def _special_tokens(usual: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Numbers for special tokens that a short vocabulary has."""
    words = fields.get("vocab_size", getattr(usual, "vocab_size", None))
    found: dict[str, Any] = {}
    for name, value in vars(usual).items():
        if not name.endswith(("_token_id", "_token_index")):
            continue
        if isinstance(value, (list, tuple)) and value:
            value = value[0]
        if isinstance(value, int) and not isinstance(value, bool) and (words is None or value >= min(words, WORDS)):
            first = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
            found[name] = first.get(name, FIRST_SPECIAL + len(found))
    return found
