"""Networks of diffusers: denoisers of pictures, videos and sound, and autoencoders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.architectures.made import Table

NETWORKS = Table()
names, network = NETWORKS.names, NETWORKS.network
Batch = Callable[[int], dict[str, Any]]
DOWN, UP = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")
CONDITION = {
    "sample_size": 16, "in_channels": 4, "out_channels": 4, "block_out_channels": (16, 32), "layers_per_block": 1,
    "down_block_types": DOWN, "up_block_types": UP, "cross_attention_dim": 32, "attention_head_dim": 8,
    "norm_num_groups": 8,
}  # fmt: skip
AUTOENCODER = {
    "in_channels": 3, "out_channels": 3, "block_out_channels": (16, 32), "latent_channels": 4, "norm_num_groups": 8,
    "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2,
}  # fmt: skip


def noisy(*shape: int, words: int = 0, **more: Callable[[int], Tensor]) -> Batch:
    """Noise, its time, and texts where there are any."""

    def batch(size: int) -> dict[str, Any]:
        found = {"sample": torch.randn(size, *shape), "timestep": torch.randint(1000, (size,))}
        if words:
            found["encoder_hidden_states"] = torch.randn(size, 12, words)
        return {**found, **{name: make(size) for name, make in more.items()}}

    return batch


def hidden(*shape: int, words: int = 32, **more: Callable[[int], Any]) -> Batch:
    """The same, as transformers call it."""

    def batch(size: int) -> dict[str, Any]:
        found = noisy(*shape, words=words)(size)
        found["hidden_states"] = found.pop("sample")
        return {**found, **{name: make(size) for name, make in more.items()}}

    return batch


def pictures(*shape: int) -> Batch:
    return lambda size: {"sample": torch.randn(size, *shape)}


def _add(name: str, batch: Batch, **options: Any) -> None:
    NETWORKS.add(f"diffusers.{name}", batch, **options)


_add("UNet2DModel", noisy(3, 32, 32), sample_size=32, block_out_channels=(16, 32), norm_num_groups=8,
     down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
     attention_head_dim=8)  # fmt: skip
_add("UNet1DModel", noisy(14, 32), sample_size=32, in_channels=14, out_channels=14, block_out_channels=(16, 32),
     down_block_types=("DownResnetBlock1D", "DownResnetBlock1D"), up_block_types=("UpResnetBlock1D",),
     mid_block_type="MidResTemporalBlock1D", out_block_type="OutConv1DBlock", act_fn="swish", layers_per_block=1,
     extra_in_channels=0, use_timestep_embedding=True, time_embedding_type="positional", flip_sin_to_cos=False,
     freq_shift=1.0)  # fmt: skip
_add("UNet2DConditionModel", noisy(4, 16, 16, words=32), **CONDITION)
_add("UNet3DConditionModel", noisy(4, 4, 16, 16, words=32), **{
    **CONDITION, "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
    "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
})  # fmt: skip
_add("UNetMotionModel", noisy(4, 4, 16, 16, words=32), sample_size=16, block_out_channels=(16, 32), layers_per_block=1,
     down_block_types=("CrossAttnDownBlockMotion", "DownBlockMotion"), norm_num_groups=8, cross_attention_dim=32,
     up_block_types=("UpBlockMotion", "CrossAttnUpBlockMotion"), num_attention_heads=2,
     motion_num_attention_heads=2)  # fmt: skip
_add("UNetSpatioTemporalConditionModel", noisy(
    4, 8, 16, 16, words=32, added_time_ids=lambda size: torch.randn(size, 3)), sample_size=16,
    block_out_channels=(32, 64), layers_per_block=1, num_attention_heads=(2, 4), addition_time_embed_dim=8,
    projection_class_embeddings_input_dim=24, cross_attention_dim=32,
    down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
    up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"))  # fmt: skip
_add("ControlNetModel", noisy(4, 16, 16, words=32, controlnet_cond=lambda size: torch.randn(size, 3, 32, 32)),
     in_channels=4, block_out_channels=(16, 32), layers_per_block=1, down_block_types=DOWN, cross_attention_dim=32,
     attention_head_dim=8, norm_num_groups=8, conditioning_embedding_out_channels=(8, 16))  # fmt: skip
_add("AutoencoderKL", pictures(3, 32, 32), **AUTOENCODER)
_add("AsymmetricAutoencoderKL", pictures(3, 32, 32), in_channels=3, out_channels=3, latent_channels=4,
     down_block_types=("DownEncoderBlock2D",) * 2, down_block_out_channels=(16, 32), layers_per_down_block=1,
     up_block_types=("UpDecoderBlock2D",) * 2, up_block_out_channels=(16, 32), layers_per_up_block=1,
     norm_num_groups=8)  # fmt: skip
_add("AutoencoderTiny", pictures(3, 32, 32), encoder_block_out_channels=(16, 16), decoder_block_out_channels=(16, 16),
     num_encoder_blocks=(1, 2), num_decoder_blocks=(2, 1))  # fmt: skip
_add("VQModel", pictures(3, 32, 32), **{**AUTOENCODER, "num_vq_embeddings": 16, "latent_channels": 3})
_add("AutoencoderKLTemporalDecoder", lambda size: {"sample": torch.randn(4 * size, 3, 32, 32), "num_frames": 4},
     block_out_channels=(32, 32), layers_per_block=1, latent_channels=4,
     down_block_types=("DownEncoderBlock2D",) * 2)  # fmt: skip
_add("AutoencoderKLCogVideoX", pictures(3, 5, 32, 32), block_out_channels=(8, 8, 8, 8), latent_channels=4,
     layers_per_block=1, norm_num_groups=2, temporal_compression_ratio=4,
     down_block_types=("CogVideoXDownBlock3D",) * 4, up_block_types=("CogVideoXUpBlock3D",) * 4)  # fmt: skip
_add("AutoencoderKLWan", pictures(3, 5, 32, 32), base_dim=8, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
     temperal_downsample=[False, True, True])  # fmt: skip
_add("AutoencoderKLLTXVideo", pictures(3, 9, 32, 32), latent_channels=8, block_out_channels=(8, 8, 8, 8),
     decoder_block_out_channels=(8, 8, 8, 8), layers_per_block=(1, 1, 1, 1, 1),
     decoder_layers_per_block=(1, 1, 1, 1, 1))  # fmt: skip
_add("AutoencoderOobleck", pictures(2, 2048), encoder_hidden_size=8, downsampling_ratios=[2, 4], decoder_channels=8,
     decoder_input_channels=8, audio_channels=2, channel_multiples=[1, 2])  # fmt: skip
_add("AutoencoderDC", pictures(3, 32, 32), in_channels=3, latent_channels=4, attention_head_dim=8,
     encoder_block_types=("ResBlock", "EfficientViTBlock"), decoder_block_types=("ResBlock", "EfficientViTBlock"),
     encoder_block_out_channels=(16, 16), decoder_block_out_channels=(16, 16), encoder_layers_per_block=(1, 1),
     decoder_layers_per_block=(1, 1), encoder_qkv_multiscales=((), (5,)), decoder_qkv_multiscales=((), (5,)),
     downsample_block_type="conv", upsample_block_type="interpolate")  # fmt: skip
_add("DiTTransformer2DModel", lambda size: {
    **hidden(4, 16, 16, words=0)(size), "class_labels": torch.randint(10, (size,))}, sample_size=16, patch_size=2,
    in_channels=4, out_channels=8, num_layers=3, attention_head_dim=16, num_attention_heads=4,
    num_embeds_ada_norm=10)  # fmt: skip
_add("PixArtTransformer2DModel", lambda size: {
    **hidden(4, 16, 16)(size), "added_cond_kwargs": {"aspect_ratio": None, "resolution": None}}, sample_size=16,
    patch_size=2, in_channels=4, out_channels=8, num_layers=3, attention_head_dim=16, num_attention_heads=4,
    cross_attention_dim=64, caption_channels=32)  # fmt: skip
_add("SD3Transformer2DModel", hidden(4, 16, 16, pooled_projections=lambda size: torch.randn(size, 64)), sample_size=16,
     patch_size=2, in_channels=4, num_layers=3, attention_head_dim=16, num_attention_heads=4, caption_projection_dim=64,
     joint_attention_dim=32, pooled_projection_dim=64, out_channels=4)  # fmt: skip
_add("FluxTransformer2DModel", lambda size: {
    **hidden(64, 16, pooled_projections=lambda count: torch.randn(count, 32))(size),
    "img_ids": torch.randn(64, 3), "txt_ids": torch.randn(12, 3)}, patch_size=1, in_channels=16, num_layers=2,
    num_single_layers=2, attention_head_dim=16, num_attention_heads=4, joint_attention_dim=32,
    pooled_projection_dim=32, axes_dims_rope=(4, 6, 6))  # fmt: skip
_add("CogVideoXTransformer3DModel", hidden(4, 4, 8, 8), num_attention_heads=4, attention_head_dim=16, in_channels=4,
     out_channels=4, time_embed_dim=16, text_embed_dim=32, num_layers=3, sample_width=8, sample_height=8,
     sample_frames=13, patch_size=2, temporal_compression_ratio=4, max_text_seq_length=12)  # fmt: skip
_add("LatteTransformer3DModel", hidden(4, 4, 8, 8), sample_size=8, num_layers=2, patch_size=2, attention_head_dim=16,
     num_attention_heads=4, caption_channels=32, in_channels=4, cross_attention_dim=64, out_channels=8,
     attention_bias=True, video_length=4, norm_type="ada_norm_single")  # fmt: skip
_add("WanTransformer3DModel", hidden(4, 2, 16, 16), patch_size=(1, 2, 2), num_attention_heads=4, attention_head_dim=16,
     in_channels=4, out_channels=4, text_dim=32, freq_dim=64, ffn_dim=128, num_layers=2)  # fmt: skip
_add("AuraFlowTransformer2DModel", hidden(4, 16, 16), sample_size=16, patch_size=2, in_channels=4, num_mmdit_layers=1,
     num_single_dit_layers=2, attention_head_dim=16, num_attention_heads=4, joint_attention_dim=32,
     caption_projection_dim=64, out_channels=4, pos_embed_max_size=64)  # fmt: skip
_add("SanaTransformer2DModel", hidden(4, 16, 16), patch_size=1, in_channels=4, out_channels=4, num_layers=2,
     attention_head_dim=16, num_attention_heads=4, num_cross_attention_heads=4, cross_attention_head_dim=16,
     cross_attention_dim=64, caption_channels=32, sample_size=16)  # fmt: skip
_add("MochiTransformer3DModel", lambda size: {
    **hidden(4, 2, 16, 16)(size), "encoder_attention_mask": torch.ones(size, 12, dtype=torch.bool)}, patch_size=2,
    num_attention_heads=4, attention_head_dim=16, num_layers=2, pooled_projection_dim=32, in_channels=4,
    text_embed_dim=32, time_embed_dim=16, max_sequence_length=12)  # fmt: skip
_add("PriorTransformer", lambda size: {
    "hidden_states": torch.randn(size, 32), "timestep": torch.randint(1000, (size,)),
    "proj_embedding": torch.randn(size, 32), "encoder_hidden_states": torch.randn(size, 12, 32)},
    num_attention_heads=4, attention_head_dim=16, num_layers=3, embedding_dim=32, num_embeddings=12,
    additional_embeddings=4)  # fmt: skip
_add("UVit2DModel", lambda size: {
    "input_ids": torch.randint(32, (size, 8, 8)), "encoder_hidden_states": torch.randn(size, 12, 32),
    "pooled_text_emb": torch.randn(size, 32), "micro_conds": torch.rand(size, 5)}, hidden_size=64,
    cond_embed_dim=32, micro_cond_encode_dim=8, micro_cond_embed_dim=40, encoder_hidden_size=32, vocab_size=40,
    codebook_size=32, in_channels=64, block_out_channels=64, num_res_blocks=1, num_hidden_layers=2,
    num_attention_heads=4, intermediate_size=128)  # fmt: skip
