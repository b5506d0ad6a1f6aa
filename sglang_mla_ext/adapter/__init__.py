"""Everything that knows SGLang. No other folder imports it."""
