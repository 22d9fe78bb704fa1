"""The stage: an animation of messages between ranks."""
