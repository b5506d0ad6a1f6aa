"""How near is the expansion of a prefix to the rate of a product of its shape?"""
