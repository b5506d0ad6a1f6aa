"""What does a shared prefix save in steps that verify drafts (NEXTN)?"""
