"""Values that the papers print of the experiments that are repeated here, to stand beside our numbers."""

from __future__ import annotations

TYPHOON_SPEED_UP = 3.24
"""TyphoonMLA, section 4, experiments on GPUs: over FlashMLA and over FlashInfer's absorb kernel, at most."""

TYPHOON_TABLE_3 = {"A": (99.1, 58.1), "B": (34.5, 25.9), "C": (26.9, 22.0)}
"""TyphoonMLA, table 3, by prompt: ms of attention by FlashMLA and by TyphoonMLA. DeepSeek-V3, 61 layers, MMLU, 128
requests."""
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

AMLA_TABLE_5 = {  # (query tokens, tokens): % of the NPU's peak, % of the GPU's
    (1, 1024): (40.9, 32.6),
    (1, 16384): (74.5, 57.8),
    (2, 1024): (57.3, 48.1),
    (2, 16384): (86.8, 67.4),
}
"""AMLA, table 5, its shortest and its longest context: 96 requests, 128 heads."""

NOMINAL_BF16_TFLOPS = {"h100": 989, "h200": 989, "h20": 148}
"""NVIDIA's rates of dense products, by name of the file in configs/gpus; the papers' shares are of such numbers."""
