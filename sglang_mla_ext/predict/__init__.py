"""Predicted cost of a model's step, from its configuration and a GPU's rates, for `sglang-mla plan`. Plain Python;
matplotlib is imported where a plot is drawn, and nowhere else."""
