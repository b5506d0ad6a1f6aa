"""How much faster, and how exact, is prefill over an expanded prefix than SGLang's?"""
