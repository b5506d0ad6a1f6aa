"""How fast does SGLang's engine decode long contexts that no two requests share?"""
