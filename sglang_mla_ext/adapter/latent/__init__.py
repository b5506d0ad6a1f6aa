"""Attention in the latent space over SGLang's pool or over ours in FP8, and that pool."""
