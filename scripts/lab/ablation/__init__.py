"""What does each step of the shared part's kernel bring?"""
