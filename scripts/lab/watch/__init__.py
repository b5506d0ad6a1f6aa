"""What does the shadow check cost in a step that is not checked?"""
