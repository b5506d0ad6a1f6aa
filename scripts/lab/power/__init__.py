"""Are the kernels at the GPU's power limit, and how busy are its matrix units?"""
