"""The demo model and the layer that drafts for it: data, training, examination."""
