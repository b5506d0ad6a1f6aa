"""Prefill in expanded form: what expands latent rows to keys and values, and attention of a prefill pass to them."""
