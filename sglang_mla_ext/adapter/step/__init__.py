"""A forward pass: chosen, planned, run through SGLang's layers, and checked."""
