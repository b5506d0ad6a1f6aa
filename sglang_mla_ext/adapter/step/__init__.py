"""A forward pass: planned, run through SGLang's layers, checked; and what is built for it at start."""
