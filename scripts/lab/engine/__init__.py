"""How long is a decode step of SGLang's whole engine over a shared prefix, without HTTP?"""
