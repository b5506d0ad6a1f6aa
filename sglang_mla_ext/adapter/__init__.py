"""Integration with SGLang: all code that depends on SGLang. No other folder imports it."""
