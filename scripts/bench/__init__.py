"""Code that benchmarks, tables and plots share."""
