"""How much error does rounding cost, on drawn data and in the answers of a trained model?"""
