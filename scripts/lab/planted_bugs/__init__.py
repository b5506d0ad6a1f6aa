"""Would the tests see a bug that a contributor could make?"""
