"""Networks of MONAI, for volumes and for slices."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.architectures.made import Table, randn, several

NETWORKS = Table()
names, network = NETWORKS.names, NETWORKS.network
NETS, SIDE = "monai.networks.nets.", 32
VOLUME, SLICE = randn(1, SIDE, SIDE, SIDE), randn(1, 2 * SIDE, 2 * SIDE)
SEGMENTS = {"spatial_dims": 3, "in_channels": 1, "out_channels": 3}
BLOCKS = {"channels": (8, 16, 32), "strides": (2, 2)}
UNET_OF_DIFFUSION = {
    "spatial_dims": 2, "in_channels": 1, "out_channels": 1, "num_res_blocks": 1, "channels": (16, 32, 32),
    "attention_levels": (False, False, True), "norm_num_groups": 8, "num_head_channels": 16,
}  # fmt: skip
AUTOENCODER = {
    "spatial_dims": 3, "in_channels": 1, "out_channels": 1, "channels": (8, 16, 16), "num_res_blocks": 1,
    "attention_levels": (False, False, True), "latent_channels": 3, "norm_num_groups": 8,
}  # fmt: skip


def noisy(size: int) -> tuple[Tensor, Tensor]:
    """Slices, and the time of each in a diffusion."""
    return torch.randn(size, 1, SIDE, SIDE), torch.randint(1000, (size,))


def noisy_with_segments(size: int) -> tuple[Tensor, Tensor, Tensor]:
    return *noisy(size), torch.randn(size, 3, SIDE, SIDE)


NETWORKS.add(f"{NETS}UNet", VOLUME, **SEGMENTS, **BLOCKS, num_res_units=1)
NETWORKS.add(f"{NETS}AttentionUnet", VOLUME, **SEGMENTS, **BLOCKS)
NETWORKS.add(f"{NETS}BasicUNet", VOLUME, **SEGMENTS, features=(8, 8, 16, 16, 32, 8))
NETWORKS.add(f"{NETS}BasicUNetPlusPlus", VOLUME, **SEGMENTS, features=(8, 8, 16, 16, 32, 8))
NETWORKS.add(f"{NETS}SegResNet", VOLUME, **SEGMENTS, init_filters=8, dropout_prob=0.1)
NETWORKS.add(f"{NETS}SegResNetVAE", VOLUME, input_image_size=(SIDE,) * 3, in_channels=1, out_channels=3, init_filters=8)
NETWORKS.add(f"{NETS}SegResNetDS", VOLUME, **SEGMENTS, init_filters=8, blocks_down=(1, 2, 2), dsdepth=2)
NETWORKS.add(f"{NETS}VNet", SLICE, spatial_dims=2, in_channels=1, out_channels=3)
NETWORKS.add(
    f"{NETS}DynUNet", VOLUME, **SEGMENTS, kernel_size=(3, 3, 3), strides=(1, 2, 2), upsample_kernel_size=(2, 2),
    filters=(8, 16, 32), deep_supervision=True, deep_supr_num=1,
)  # fmt: skip
NETWORKS.add(
    f"{NETS}UNETR", VOLUME, in_channels=1, out_channels=3, img_size=SIDE, feature_size=8, hidden_size=48, mlp_dim=96,
    num_heads=4,
)  # fmt: skip
NETWORKS.add(f"{NETS}SwinUNETR", SLICE, spatial_dims=2, in_channels=1, out_channels=3, feature_size=12)
NETWORKS.add(
    f"{NETS}SwinUNETR", SLICE, name="SwinUNETR-checkpointed", spatial_dims=2, in_channels=1, out_channels=3,
    feature_size=12, use_checkpoint=True,
)  # fmt: skip
NETWORKS.add(f"{NETS}MedNeXt", SLICE, spatial_dims=2, init_filters=8, in_channels=1, out_channels=3,
             blocks_down=(1, 1, 1), blocks_bottleneck=1, blocks_up=(1, 1, 1))  # fmt: skip
NETWORKS.add(f"{NETS}HighResNet", SLICE, spatial_dims=2, in_channels=1, out_channels=3)
NETWORKS.add(f"{NETS}FlexibleUNet", randn(3, 64, 64), in_channels=3, out_channels=3, backbone="efficientnet-b0")
NETWORKS.add(f"{NETS}Quicknat", SLICE, num_classes=3, num_channels=1, num_filters=16)
NETWORKS.add(f"{NETS}DenseNet121", VOLUME, spatial_dims=3, in_channels=1, out_channels=3, init_features=16,
             growth_rate=8)  # fmt: skip
NETWORKS.add(f"{NETS}EfficientNetBN", randn(3, 64, 64), model_name="efficientnet-b0", pretrained=False, spatial_dims=2)
NETWORKS.add(f"{NETS}ResNet", VOLUME, block="basic", layers=[1, 1, 1, 1], block_inplanes=[8, 16, 32, 64],
             n_input_channels=1, num_classes=3)  # fmt: skip
NETWORKS.add(f"{NETS}SEResNet50", randn(3, 64, 64), spatial_dims=2, in_channels=3, num_classes=3)
NETWORKS.add(f"{NETS}ViT", VOLUME, in_channels=1, img_size=(SIDE,) * 3, patch_size=(8,) * 3, hidden_size=64,
             mlp_dim=128, num_layers=4, num_heads=4, classification=True, num_classes=3)  # fmt: skip
NETWORKS.add(f"{NETS}ViTAutoEnc", VOLUME, in_channels=1, img_size=(SIDE,) * 3, patch_size=(4,) * 3, hidden_size=64,
             mlp_dim=128, num_layers=4, num_heads=4, deconv_chns=8)  # fmt: skip
NETWORKS.add(f"{NETS}AutoEncoder", VOLUME, **SEGMENTS, channels=(8, 16, 32), strides=(2, 2, 1))
NETWORKS.add(f"{NETS}VarAutoEncoder", VOLUME, spatial_dims=3, in_shape=(1, SIDE, SIDE, SIDE), out_channels=1,
             latent_size=8, channels=(8, 16, 32), strides=(2, 2, 1))  # fmt: skip
NETWORKS.add(f"{NETS}AutoencoderKL", VOLUME, **AUTOENCODER)
NETWORKS.add(f"{NETS}VQVAE", VOLUME, spatial_dims=3, in_channels=1, out_channels=1, channels=(8, 16),
             num_res_channels=(8, 16), num_res_layers=1, downsample_parameters=((2, 4, 1, 1),) * 2,
             upsample_parameters=((2, 4, 1, 1, 0),) * 2, num_embeddings=16, embedding_dim=8)  # fmt: skip
NETWORKS.add(f"{NETS}DiffusionModelUNet", noisy, **UNET_OF_DIFFUSION)
NETWORKS.add(f"{NETS}SPADEDiffusionModelUNet", noisy_with_segments, **UNET_OF_DIFFUSION, label_nc=3)
NETWORKS.add(f"{NETS}PatchDiscriminator", VOLUME, spatial_dims=3, channels=8, in_channels=1, num_layers_d=2)
NETWORKS.add(f"{NETS}MultiScalePatchDiscriminator", SLICE, num_d=2, num_layers_d=2, spatial_dims=2, channels=8,
             in_channels=1, out_channels=1)  # fmt: skip
NETWORKS.add(f"{NETS}RegUNet", VOLUME, spatial_dims=3, in_channels=1, num_channel_initial=8, depth=2)
NETWORKS.add(f"{NETS}LocalNet", VOLUME, spatial_dims=3, in_channels=1, num_channel_initial=8,
             extract_levels=(0, 1, 2))  # fmt: skip
NETWORKS.add(f"{NETS}GlobalNet", VOLUME, image_size=(SIDE,) * 3, spatial_dims=3, in_channels=1, num_channel_initial=8,
             depth=3)  # fmt: skip
NETWORKS.add(f"{NETS}Regressor", VOLUME, in_shape=(1, SIDE, SIDE, SIDE), out_shape=(3,), channels=(8, 16),
             strides=(2, 2))  # fmt: skip
NETWORKS.add(f"{NETS}Discriminator", VOLUME, in_shape=(1, SIDE, SIDE, SIDE), channels=(8, 16), strides=(2, 2))
NETWORKS.add(f"{NETS}Generator", randn(16), latent_shape=(16,), start_shape=(16, 8, 8), channels=(16, 8),
             strides=(2, 2))  # fmt: skip
NETWORKS.add(f"{NETS}FullyConnectedNet", randn(256), in_channels=256, out_channels=8, hidden_channels=(256, 256, 128),
             dropout=0.1)  # fmt: skip
NETWORKS.add(f"{NETS}restormer.Restormer", SLICE, spatial_dims=2, in_channels=1, out_channels=1, dim=16,
             num_blocks=(1, 1, 1), heads=(1, 2, 2), num_refinement_blocks=1)  # fmt: skip
NETWORKS.add(f"{NETS}MaskedAutoEncoderViT", VOLUME, in_channels=1, img_size=(SIDE,) * 3, patch_size=(8,) * 3,
             hidden_size=48, mlp_dim=96, num_layers=2, num_heads=4, decoder_hidden_size=48, decoder_mlp_dim=96,
             decoder_num_layers=2, decoder_num_heads=4)  # fmt: skip
NETWORKS.add(f"{NETS}AHNet", SLICE, spatial_dims=2, in_channels=1, out_channels=3, psp_block_num=0)
NETWORKS.add(f"{NETS}VoxelMorphUNet", randn(2, SIDE, SIDE, SIDE), spatial_dims=3, in_channels=2,
             unet_out_channels=8, channels=(8, 8, 16, 16, 16, 8), final_conv_channels=(8, 8))  # fmt: skip
NETWORKS.add(f"{NETS}ControlNet", lambda size: (*noisy(size), torch.randn(size, 1, 2 * SIDE, 2 * SIDE)),
             spatial_dims=2, in_channels=1, channels=(16, 32, 32), num_res_blocks=1, num_head_channels=16,
             attention_levels=(False, False, True), norm_num_groups=8, conditioning_embedding_in_channels=1,
             conditioning_embedding_num_channels=(8, 16))  # fmt: skip
NETWORKS.add(f"{NETS}SPADEAutoencoderKL", several(randn(1, SIDE, SIDE), randn(3, SIDE, SIDE)),
             **{**AUTOENCODER, "spatial_dims": 2}, label_nc=3)  # fmt: skip
NETWORKS.add(f"{NETS}SENet154", randn(3, 64, 64), name="SENet", spatial_dims=2, in_channels=3, num_classes=3,
             layers=(1, 1, 1, 1))  # fmt: skip
