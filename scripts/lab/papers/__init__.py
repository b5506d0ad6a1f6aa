"""The papers' experiments: what do their figures, tables and formulas give, on this GPU?"""
