"""Values that the papers print of the experiments that are repeated here, to stand beside our numbers."""

from __future__ import annotations

TYPHOON_SPEED_UP = 3.24
"""TyphoonMLA, section 4, experiments on GPUs: over FlashMLA and over FlashInfer's absorb kernel, at most."""

TYPHOON_TABLE_3 = {  # prompt: FlashMLA, TyphoonMLA, each ms of attention, ms in all, thousands of tokens per second
    "A": ((99.1, 127.2, 1.01), (58.1, 86.3, 1.48)),
    "B": ((34.5, 62.6, 2.04), (25.9, 54.0, 2.37)),
    "C": ((26.9, 55.0, 2.33), (22.0, 50.1, 2.56)),
}
"""TyphoonMLA, table 3: DeepSeek-V3, 61 layers, MMLU, 128 requests."""
TYPHOON_TABLE_3_REQUESTS, TYPHOON_TABLE_3_LAYERS = 128, 61

TYPHOON_STAGES_MS = {"absorb only": 6.43, "stage 1": 1.63, "stage 2": 1.06}
"""TyphoonMLA, section 4, latency breakdown, 1,024 requests on an Ascend NPU; the figure itself prints no values."""
TYPHOON_STAGES_RATIO = 3.3
"""Ratio of the shared part's times, absorb over naive."""

SNAPMLA_SHARE = 0.85
"""SnapMLA, section 4.4: of the effective peak of equation 7, with 64 heads and more."""
SNAPMLA_BF16_TFLOPS = 148
"""BF16 rate of SnapMLA's GPU."""

ETAP_TFLOPS = {  # (requests, tokens): FlashMLA-ETAP's, and others', on an H20
    (16, 512): {"FlashMLA-ETAP": 13, "FlashMLA": 9},
    (16, 65536): {"FlashMLA-ETAP": 89, "FlashMLA": 32, "FlashInfer": 18, "FlashAttention-3": 17},
    (32, 65536): {"FlashMLA-ETAP": 87, "FlashMLA": 32, "FlashInfer": 23, "FlashAttention-3": 21},
}
"""FlashMLA-ETAP, section 4.2: what the text says of figure 1."""

AMLA_TABLE_5 = {  # (query tokens, tokens): us on the NPU, % of its peak, us on the GPU, % of its peak
    (1, 1024): (95, 40.9, 85, 32.6),
    (1, 2048): (140, 55.1, 128, 43.3),
    (1, 3072): (186, 62.4, 173, 48.0),
    (1, 4096): (241, 64.1, 215, 51.5),
    (1, 6144): (331, 70.2, 316, 52.6),
    (1, 16384): (830, 74.5, 766, 57.8),
    (2, 1024): (135, 57.3, 115, 48.1),
    (2, 2048): (219, 70.7, 196, 56.5),
    (2, 3072): (306, 75.8, 278, 59.8),
    (2, 4096): (388, 79.7, 374, 59.2),
    (2, 6144): (565, 82.2, 527, 63.0),
    (2, 16384): (1427, 86.8, 1314, 67.4),
}
"""96 requests, 128 heads."""

NOMINAL_BF16_TFLOPS = {"h100": 989, "h200": 989, "h20": 148}
"""NVIDIA's rates of dense products, by name of the file in configs/gpus; the papers' shares are of such numbers."""
