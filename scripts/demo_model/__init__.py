"""The demo model (configs/demo_model): small random checkpoints of its form, and the chats of the demo."""
