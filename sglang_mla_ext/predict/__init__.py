"""What a step of a model costs, from its configuration and a GPU's rates: what `sglang-mla plan` shows. Plain Python;
matplotlib is imported where a plot is drawn, and nowhere else."""
