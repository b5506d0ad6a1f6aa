"""The demo model (configs/demo_model): its data, training, examination, and the chats of the demo."""
