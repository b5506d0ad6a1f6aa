"""Shared-prefix attention for Multi-head Latent Attention models served by SGLang."""

__version__ = "0.1.0"

BACKEND_NAME = "hybrid_mla"
