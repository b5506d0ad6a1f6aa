"""Studies: one package for each question, run by scripts/study.py."""
