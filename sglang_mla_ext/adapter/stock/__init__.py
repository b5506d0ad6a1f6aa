"""SGLang's own attention backends, which the hybrid backend owns."""
