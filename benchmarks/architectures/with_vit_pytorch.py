"""Networks of vit-pytorch: attention over pictures, videos and rows, in many variants."""

from __future__ import annotations

from benchmarks.architectures.made import Table, randn
from benchmarks.architectures.network import Network
from benchmarks.architectures.without_torchvision import stand_in

NETWORKS = Table()
names = NETWORKS.names
PICTURE, VIDEO = randn(3, 64, 64), randn(3, 4, 32, 32)
COMMON = {"num_classes": 10, "dim": 64, "depth": 3, "heads": 4, "mlp_dim": 128}
OF_PICTURES = {**COMMON, "image_size": 64, "patch_size": 8}
OF_VIDEOS = {**COMMON, "image_size": 32, "frames": 4, "image_patch_size": 8, "frame_patch_size": 2}
DROPPED = {"dropout": 0.1, "emb_dropout": 0.1}


def network(name: str) -> Network:
    stand_in()
    return NETWORKS.network(name)


def _add(module: str, class_name: str, batch: object = PICTURE, **options: object) -> None:
    NETWORKS.add(f"vit_pytorch.{module}.{class_name}", batch, name=module, **options)  # type: ignore[arg-type]


_add("vit", "ViT", **OF_PICTURES, **DROPPED)
_add("deepvit", "DeepViT", **OF_PICTURES, **DROPPED)
_add("cait", "CaiT", **OF_PICTURES, cls_depth=2, layer_dropout=0.05, **DROPPED)
_add("simple_vit", "SimpleViT", **OF_PICTURES)
_add("simple_vit_with_patch_dropout", "SimpleViT", **OF_PICTURES, patch_dropout=0.5)
_add("simple_vit_with_register_tokens", "SimpleViT", **OF_PICTURES)
_add("simple_vit_with_fft", "SimpleViT", **OF_PICTURES, freq_patch_size=8)
_add("simple_vit_with_qk_norm", "SimpleViT", **OF_PICTURES)
_add("simple_vit_with_value_residual", "SimpleViT", **OF_PICTURES)
_add("simple_flash_attn_vit", "SimpleViT", **OF_PICTURES)
_add("simple_vit_3d", "SimpleViT", VIDEO, **OF_VIDEOS)
_add("simple_uvit", "SimpleUViT", **{**OF_PICTURES, "depth": 4})
_add("vit_3d", "ViT", VIDEO, **OF_VIDEOS)
_add("vivit", "ViViT", VIDEO, image_size=32, frames=4, image_patch_size=8, frame_patch_size=2, num_classes=10, dim=64,
     spatial_depth=2, temporal_depth=2, heads=4, mlp_dim=128)  # fmt: skip
_add("vit_1d", "ViT", randn(3, 256), seq_len=256, patch_size=8, **COMMON, **DROPPED)
_add("vit_with_patch_dropout", "ViT", **OF_PICTURES, patch_dropout=0.5)
_add("vit_with_patch_merger", "ViT", **{**OF_PICTURES, "depth": 4}, patch_merge_layer=2, patch_merge_num_tokens=8)
_add("vit_for_small_dataset", "ViT", **OF_PICTURES, **DROPPED)
_add("parallel_vit", "ViT", **OF_PICTURES, num_parallel_branches=2)
_add("ats_vit", "ViT", **OF_PICTURES, max_tokens_per_depth=(32, 16, 8))
_add("normalized_vit", "nViT", **OF_PICTURES)
_add("rvt", "RvT", **OF_PICTURES)
_add("xcit", "XCiT", **OF_PICTURES, cls_depth=1, local_patch_kernel_size=3)
_add("pit", "PiT", image_size=64, patch_size=8, num_classes=10, dim=32, depth=(1, 1, 1), heads=2, mlp_dim=64)
_add("levit", "LeViT", image_size=64, num_classes=10, stages=2, dim=(32, 64), depth=2, heads=(2, 4), mlp_mult=2)
_add("cvt", "CvT", num_classes=10, s1_emb_dim=16, s2_emb_dim=32, s3_emb_dim=64, s1_depth=1, s2_depth=1, s3_depth=2)
_add("cct", "CCT", img_size=64, embedding_dim=64, n_conv_layers=2, kernel_size=7, stride=2, padding=3,
     pooling_kernel_size=3, pooling_stride=2, pooling_padding=1, num_layers=3, num_heads=4, mlp_ratio=2,
     num_classes=10, positional_embedding="learnable")  # fmt: skip
_add("cross_vit", "CrossViT", image_size=64, num_classes=10, depth=2, sm_dim=32, sm_patch_size=8, sm_enc_depth=1,
     sm_enc_heads=2, sm_enc_mlp_dim=64, lg_dim=64, lg_patch_size=16, lg_enc_depth=2, lg_enc_heads=4,
     lg_enc_mlp_dim=64, cross_attn_depth=1, cross_attn_heads=4)  # fmt: skip
_add("crossformer", "CrossFormer", randn(3, 224, 224), num_classes=10, dim=(32, 32, 64, 64), depth=(1, 1, 2, 1),
     global_window_size=(8, 4, 2, 1), local_window_size=7)  # fmt: skip
_add("regionvit", "RegionViT", randn(3, 224, 224), dim=(16, 32, 32, 64), depth=(1, 1, 2, 1), window_size=7,
     num_classes=10)  # fmt: skip
_add("scalable_vit", "ScalableViT", randn(3, 256, 256), num_classes=10, dim=16, heads=(1, 2, 2, 4), depth=(1, 1, 1, 1),
     ssa_dim_key=8, reduction_factor=(8, 4, 2, 1), window_size=(64, 32, None, None))  # fmt: skip
_add("sep_vit", "SepViT", randn(3, 224, 224), num_classes=10, dim=16, dim_head=16, heads=(1, 2, 2, 4),
     depth=(1, 1, 1, 1), window_size=7)  # fmt: skip
_add("max_vit", "MaxViT", randn(3, 224, 224), num_classes=10, dim_conv_stem=16, dim=16, dim_head=16,
     depth=(1, 1, 1), window_size=7)  # fmt: skip
_add("nest", "NesT", randn(3, 64, 64), image_size=64, patch_size=4, dim=32, heads=2, num_hierarchies=3,
     block_repeats=(1, 1, 2), num_classes=10)  # fmt: skip
_add("twins_svt", "TwinsSVT", randn(3, 224, 224), num_classes=10, s1_emb_dim=16, s2_emb_dim=32, s3_emb_dim=32,
     s4_emb_dim=64, s3_depth=1, s4_depth=1)  # fmt: skip
_add("mobile_vit", "MobileViT", randn(3, 128, 128), image_size=(128, 128), dims=[32, 48, 64],
     channels=[8, 16, 16, 16, 24, 24, 32, 32, 48, 48, 64], num_classes=10)  # fmt: skip
_add("t2t", "T2TViT", randn(3, 64, 64), dim=64, image_size=64, depth=2, heads=4, mlp_dim=128, num_classes=10,
     t2t_layers=((7, 4), (3, 2), (3, 2)))  # fmt: skip
_add("learnable_memory_vit", "ViT", **OF_PICTURES)
_add("jumbo_vit", "JumboViT", **{**OF_PICTURES, "dim": 32}, jumbo_cls_k=2, dim_head=16)
_add("look_vit", "LookViT", randn(3, 96, 96), image_size=96, num_classes=10, dim=64, depth=2, patch_size=16, heads=4,
     dim_head=16, cross_attn_heads=4, cross_attn_dim_head=16)  # fmt: skip
_add("looped_vit", "LoopedViT", num_classes=10, dim=64, image_size=64, patch_size=8, pre_loop_depth=1,
     num_looped_blocks=1, post_loop_depth=1, loop_depth=3, heads=4, mlp_dim=128)  # fmt: skip
_add("simple_vit_with_hyper_connections", "SimpleViT", **OF_PICTURES, num_residual_streams=2)
_add("simple_vit_attn_residual", "SimpleViTAttnResidual", **OF_PICTURES)
_add("simple_vit_orthog_residual_update", "SimpleViT", **OF_PICTURES)
_add("simple_vit_with_sparse_gating", "SimpleViTWithSparseGating", **OF_PICTURES)
_add("simple_vit_with_specialized_cls", "SimpleViT", **OF_PICTURES)
_add("simple_vit_with_relative_proj_pos_bias", "SimpleViT", **OF_PICTURES)
_add("simple_vit_1d", "SimpleViT", randn(3, 256), seq_len=256, patch_size=8, **COMMON)
_add("simple_flash_attn_vit_3d", "SimpleViT", VIDEO, **OF_VIDEOS)
_add("vit_5", "ViT", **OF_PICTURES, **DROPPED)
_add("vit_detpool", "ViTDetPool", **OF_PICTURES, **DROPPED)
_add("vit_with_decorr", "ViT", **OF_PICTURES, decorr_dim_subspace=16)
_add("vit_with_keel_post_ln", "ViT", **OF_PICTURES, **DROPPED)
_add("jet_vit", "JetViT", **OF_PICTURES, window_size=4)
_add("vit_nd", "ViTND", VIDEO, ndim=3, input_shape=(4, 32, 32), patch_size=(2, 8, 8), **COMMON)
_add("vit_nd_rotary", "ViTND", VIDEO, ndim=3, input_shape=(4, 32, 32), patch_size=(2, 8, 8), **COMMON)
_add("max_vit_with_registers", "MaxViT", randn(3, 224, 224), num_classes=10, dim_conv_stem=16, dim=16, dim_head=16,
     depth=(1, 1, 1))  # fmt: skip
_add("wwt", "WWT", image_size=64, patch_size=8, num_classes=10, dim=64, depth=2, num_slots=8, heads=4, dim_head=16)
