"""What the benchmarks and the tables of their results share."""
