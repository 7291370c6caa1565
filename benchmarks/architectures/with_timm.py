"""Networks of timm: a small one of each family."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.architectures.network import Network
from benchmarks.architectures.without_torchvision import stand_in

SIDE, CLASSES = 64, 10
LARGER_SIDES = {"inception_v3": 96, "inception_v4": 96, "xception41": 96, "crossvit_tiny_240": 240,
                "efficientformer_l1": 224, "halonet26t": 256}  # fmt: skip
NAMES = (
    "resnet10t", "vit_tiny_patch16_224", "convnext_atto", "swin_tiny_patch4_window7_224", "mixer_s32_224",
    "efficientnet_lite0", "mobilevit_xxs", "densenet121", "regnetx_002", "mobilenetv3_small_050", "mambaout_femto",
    "poolformer_s12", "pvt_v2_b0", "deit_tiny_patch16_224", "beit_base_patch16_224", "cait_xxs24_224",
    "coat_lite_tiny", "convit_tiny", "convmixer_768_32", "crossvit_tiny_240", "cspdarknet53", "davit_tiny", "dla34",
    "dpn48b", "edgenext_xx_small", "efficientformer_l1", "efficientformerv2_s0", "efficientvit_b0",
    "efficientvit_m0", "eva02_tiny_patch14_224", "fasternet_t0", "fastvit_t8", "focalnet_tiny_srf",
    "gcvit_xxtiny", "ghostnet_050", "hardcorenas_a", "hgnetv2_b0", "hiera_tiny_224", "hrnet_w18_small",
    "inception_next_atto", "inception_v3", "lcnet_035", "levit_128s", "maxvit_pico_rw_256", "coatnet_pico_rw_224",
    "mobilenetv4_conv_small_035", "mvitv2_tiny", "nest_tiny", "nextvit_small", "nf_regnet_b0",
    "pit_ti_224", "rdnet_tiny", "repghostnet_050", "repvgg_a0", "repvit_m0_9", "res2net50_14w_8s", "resnest14d",
    "resnetv2_18", "rexnetr_100", "selecsls42", "seresnet18", "sequencer2d_s", "shvit_s1", "skresnet18", "starnet_s050",
    "swiftformer_xs", "swinv2_tiny_window8_256", "swinv2_cr_tiny_224", "tiny_vit_5m_224", "tnt_s_legacy_patch16_224",
    "tresnet_m", "twins_svt_small", "visformer_tiny", "vit_relpos_small_patch16_224", "vitamin_small_224",
    "volo_d1_224", "ese_vovnet19b_slim", "xcit_nano_12_p16_224", "xception41", "gmlp_ti16_224", "resmlp_12_224",
    "botnet26t_256", "halonet26t", "lambda_resnet26t", "eca_resnet33ts", "semnasnet_050", "mnasnet_small",
    "fbnetc_100", "spnasnet_100", "tinynet_e", "mixnet_s", "iformer_s", "csatv2",
)  # fmt: skip


def names() -> list[str]:
    """Those that this version of timm knows."""
    stand_in()
    import timm

    known = set(timm.list_models())
    return [name for name in NAMES if name in known]


def network(name: str) -> Network:
    stand_in()
    import timm

    side = LARGER_SIDES.get(name, SIDE)
    options: dict[str, Any] = {"num_classes": CLASSES, "drop_rate": 0.1}
    try:
        model = timm.create_model(name, img_size=side, **options)
    except TypeError:  # it takes pictures of any size
        model = timm.create_model(name, **options)
    except AssertionError:  # or of its own size alone
        model = timm.create_model(name, **options)
        side = model.default_cfg["input_size"][-1]

    def loss(output: Any) -> Tensor:
        scores = output[0] if isinstance(output, tuple) else output
        return torch.nn.functional.cross_entropy(scores, torch.randint(CLASSES, scores.shape[:1]))

    return Network(model.train(), lambda size: (torch.randn(size, 3, side, side),), loss)
