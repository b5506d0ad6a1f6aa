"""Hooks and stubs to start SGLang's own server on a machine without a GPU. Nothing here is imported on a GPU
machine."""
